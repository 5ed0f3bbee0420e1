"""MJ-VIDEO's head against its original code; the reward around it with a stand-in for InternVL2."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from flowalign.types import MediaBatch
from reward_models.backbones.checkpoints import load_exactly
from reward_models.backbones.reward_bases import Unscorable
from reward_models.preference import mj_video
from reward_models.preference.mj_video import (
    ASPECTS,
    TURN,
    MJVideo,
    MJVideoHead,
    Reader,
    Reading,
    combine,
    find_last_turn,
    softmax_within,
)
from tests.fixtures.golden import GOLDEN, load
from tests.fixtures.reward_contract import (
    check_contract,
    check_fingerprints,
    check_keys,
    example_batch,
)

torch.set_num_threads(1)
RECORDED = load("H_mjvideo_head")
PARAMETERS = {k.removeprefix("param."): v for k, v in RECORDED.items() if k.startswith("param.")}
PAD = 2
BACKBONE = {"model.language_model.output.weight": torch.ones(2)}


def recorded_reading():
    lengths = (RECORDED["input_ids"] != PAD).sum(1).tolist()
    return Reading(RECORDED["hidden_states"], RECORDED["input_ids"], lengths)


def recorded_head(temperature=1.0):
    head = MJVideoHead(16, gate_width=12, temperature=temperature)
    load_exactly(head, PARAMETERS, GOLDEN)
    return head


def test_scores_are_those_of_the_original():
    scores = recorded_head().read(recorded_reading())
    for name, value in (
        ("rewards", scores.criteria),
        ("criteria_weights", scores.weights),
        ("aspect_scores", scores.aspects),
        ("aspect_gating", scores.gate),
        ("score", scores.overall),
    ):
        torch.testing.assert_close(value, RECORDED[name], rtol=1e-5, atol=1e-6, msg=name)


def test_temperature_is_applied_to_both_gates_and_scale_to_their_weights():
    head = recorded_head(temperature=4.0)
    last, turn = RECORDED["hidden_last"], RECORDED["prompt_embedding"]
    scores = head(last, turn)
    logits = RECORDED["criteria_logits"]
    first = logits[:, :5].div(4).softmax(1) * PARAMETERS["criteria_gating.logit_scale"]
    torch.testing.assert_close(scores.weights[:, :5], first)
    cold = recorded_head()(last, turn)
    scale = PARAMETERS["aspect_gating.logit_scale"]
    torch.testing.assert_close(scores.gate.sum(1), scale.expand(3))
    flattened = (cold.gate / scale) ** 0.25
    torch.testing.assert_close(scores.gate / scale, flattened / flattened.sum(1, keepdim=True))


def test_scores_are_combined_within_their_aspect_by_hand():
    criteria, weights = torch.zeros(1, 28), torch.full((1, 28), 0.5)
    criteria[0, [0, 4, 5, 10, 11, 22, 27]] = torch.tensor([1.0, 2, 3, 4, 5, 6, 7])
    gate = torch.tensor([[1.0, 10, 100, 1000, 10000]])
    scores = combine(criteria, weights, gate)
    assert scores.aspects.tolist() == [[1.5, 3.5, 2.5, 3.0, 3.5]]
    assert scores.overall.tolist() == [1.5 + 35 + 250 + 3000 + 35000]


def test_weights_sum_to_one_in_every_aspect():
    logits = torch.randn(2, 28, generator=torch.Generator().manual_seed(0))
    sums = [x.sum(1) for x in softmax_within(logits).split(list(ASPECTS.values()), 1)]
    torch.testing.assert_close(torch.stack(sums, 1), torch.ones(2, 5))
    shifted = logits.clone()
    shifted[:, :5] += 3  # of one aspect: nothing changes
    torch.testing.assert_close(softmax_within(shifted), softmax_within(logits))


def test_the_last_end_of_a_turn_counts_and_a_part_of_one_does_not():
    assert find_last_turn([7, *TURN, 1, *TURN, 9, *TURN[:4]]) == 7
    assert find_last_turn(list(TURN)) == 0
    with pytest.raises(ValueError, match="do not hold the end of the user's turn"):
        find_last_turn([1, *TURN[:4], 1, *TURN[1:]])


class TinyReader(Reader):
    """Mean colours of every frame, the prompt's letters, then a causal sum."""

    name, width = "tiny", 16

    def read(self, tensors):
        assert list(tensors) == ["language_model.output.weight"]
        return TinyInternVL()

    def check(self, prompt):
        if "<s>" in prompt:
            raise Unscorable("its prompt names a word of the model")


class TinyInternVL(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.see, self.embed = nn.Linear(3 * 4 * 4, 16), nn.Embedding(256, 16)

    def forward(self, frames, prompts):
        seen = self.see(nn.functional.adaptive_avg_pool2d(frames.flatten(0, 1), 4).flatten(1))
        seen = seen.unflatten(0, frames.shape[:2])
        texts = [[ord(c) % 256 for c in prompt] for prompt in prompts]
        lengths = [8 + len(text) + len(TURN) for text in texts]
        ids = torch.full((len(texts), max(lengths)), PAD)
        for row, text in zip(ids, texts, strict=True):
            row[8 : 8 + len(text) + len(TURN)] = torch.tensor([*text, *TURN])
        hidden = torch.cat([seen, self.embed(ids[:, 8:] % 256)], 1).cumsum(1)
        return Reading(hidden / 10, ids, lengths)


@pytest.fixture
def checkpoint(tmp_path):
    save_file(PARAMETERS | BACKBONE, tmp_path / "model.safetensors")
    return tmp_path


def tiny(checkpoint, **kwargs):
    return MJVideo(TinyReader(), str(checkpoint), gate_width=12, device="cpu", **kwargs)


def test_what_every_reward_promises(checkpoint, monkeypatch):
    monkeypatch.setattr(mj_video, "SIDE", 28)
    check_contract(tiny(checkpoint), example_batch(3, frames=9))


def test_the_reader_sees_eight_normalised_frames_of_the_published_size(checkpoint):
    model = tiny(checkpoint)
    model.load()
    seen = []
    model.network["reader"].register_forward_pre_hook(lambda _, args: seen.append(args))
    media = torch.zeros(1, 17, 3, 6, 10)
    media[0, 2] = 1  # the second of 0, 2, 4 ...
    model.score(MediaBatch(media, ["a cat"]))
    ((frames, prompts),) = seen
    assert frames.shape == (1, 8, 3, 448, 448)
    assert prompts == ["a cat"]
    black, white = frames[0, 0, :, 0, 0], frames[0, 1, :, 0, 0]
    torch.testing.assert_close(black, -torch.tensor([0.485, 0.456, 0.406]) / _STD)
    torch.testing.assert_close(white - black, 1 / _STD)


_STD = torch.tensor([0.229, 0.224, 0.225])


def test_a_head_that_does_not_fit_is_refused_by_key(tmp_path):
    save_file(PARAMETERS | BACKBONE, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="of another shape"):
        MJVideo(TinyReader(), str(tmp_path)).load()
    file = tmp_path / "model.safetensors"
    check_keys(file, "reward_transform_matrix", tiny(tmp_path).load)


def test_settings_are_checked_and_enter_the_fingerprint(checkpoint):
    with pytest.raises(ValueError, match="temperature of MJVideo is 0"):
        tiny(checkpoint, temperature=0.0)
    check_fingerprints(
        [tiny(checkpoint), tiny(checkpoint, temperature=2.0), tiny(checkpoint, criteria=True)]
    )


def test_all_criteria_can_be_dimensions_of_their_own(checkpoint, monkeypatch):
    monkeypatch.setattr(mj_video, "SIDE", 28)
    batch = example_batch(3, frames=9)
    few, all_of_them = (tiny(checkpoint, criteria=c).score(batch).values for c in (False, True))
    assert all_of_them.shape == (3, 6 + 28)
    assert torch.equal(all_of_them[:, :6], few)
    dims = tiny(checkpoint, criteria=True).spec.dims
    assert (dims[6], dims[11], dims[33]) == ("alignment_object", "safety_crime", "fairness_gender")
    assert len(all_of_them[0].unique()) == 34


def test_a_prompt_that_the_reader_refuses_fails_alone(checkpoint, monkeypatch):
    monkeypatch.setattr(mj_video, "SIDE", 28)
    batch = example_batch(3, frames=9)
    values = tiny(checkpoint).score(batch).values
    prompts = [batch.prompts[0], "a <s>", batch.prompts[2]]
    output = tiny(checkpoint).score(replace(batch, prompts=prompts))
    assert output.reasons == {1: "its prompt names a word of the model"}
    torch.testing.assert_close(output.values[[0, 2]], values[[0, 2]])
