"""Where examples come from: files in an order, and samples that the policy makes itself."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import tensor
from torch.nn.functional import adaptive_avg_pool2d
from torch.testing import assert_close

from flowalign.credit.chain import Gain
from flowalign.data.encode_once import LatentCache, PromptEmbeddingCache
from flowalign.data.preference.collate import Collator, read_map
from flowalign.data.preference.preference_data import (
    BestWorst,
    Dominance,
    Gap,
    GapWeights,
    Pair,
    Sample,
    Segment,
)
from flowalign.data.prefetch import EpochSampler
from flowalign.distributed.processes import Processes
from flowalign.extra.regional_dpo import LocalDPO
from flowalign.losses import DPO, KTO, SFT, AutoBeta
from flowalign.rewards.composite import Rewards
from flowalign.sampling.inference import generate
from flowalign.training.matching import EMAReference, Rollouts, SamplerGrid, StoredDataset
from flowalign.training.matching.matching_loop import measure_held_out
from flowalign.training.matching.source import StreamContext
from flowalign.types import RewardModel, RewardOutput, RewardSpec, plain_requests
from flowalign.utils.costs import Costs
from flowalign.utils.media.media import Media
from flowalign.utils.seeds import generator
from tests.fixtures.pixel import PixelPolicy, Redness
from tests.fixtures.preference import jsonl, logit, paint, painted, recipe, shade, stored, train
from tests.fixtures.ranks import assert_two_equal_one, results_of_two, untimed
from tests.fixtures.training import ALONE, context, flat, new_learner


def rows_of(count: int) -> torch.Tensor:
    """Latents of the painted pairs, winners and then losers."""
    return logit(*(shade(k)[0] for k in range(count)), *(shade(k)[1] for k in range(count)))


def batch_of(stream, step: int = 0):
    return next(iter(stream.batches([step])))


class Halves(PixelPolicy):
    """Latents that know left from right: the mean colour of both halves, [3, 1, 2]."""

    def encoders(self):
        return "halves", "length"

    def embed(self, media):
        return adaptive_avg_pool2d(media[:, 0], (1, 2))


# Stored -------------------------------------------------------------------------------------------


def test_a_step_is_a_batch_of_pairs_winners_first(tmp_path):
    stream = stored(painted(tmp_path, 6), new_learner())
    batch = batch_of(stream)
    examples = batch.examples
    assert (batch.first, batch.total, "pair" in examples) == (0, 4, True)
    lengths = examples["cond"]["length"][:, 0]
    assert torch.equal(lengths[:4], lengths[4:])
    chosen = (lengths[:4] - 1).long()
    assert len(chosen.unique()) == 4
    assert_close(examples["latents"], rows_of(6)[torch.cat([chosen, chosen + 6])])
    assert examples["desirable"].tolist() == [True] * 4 + [False] * 4
    assert examples["weight"].tolist() == [1.0] * 8
    assert {*examples} == {"latents", "cond", "weight", "desirable", "pair"}


def test_an_epoch_has_every_pair_once_and_the_next_begins_within_a_step(tmp_path):
    stream = stored(painted(tmp_path, 6), new_learner())
    seen = [
        int(length)
        for batch in stream.batches(range(6))
        for length in batch.examples["cond"]["length"][:4, 0]
    ]
    assert [Counter(seen[i : i + 6]) for i in range(0, 24, 6)] == [Counter(range(1, 7))] * 4
    assert len({tuple(seen[i : i + 6]) for i in range(0, 24, 6)}) > 1


def test_a_step_is_a_function_of_the_seed_wherever_a_run_begins(tmp_path):
    path, cfg = painted(tmp_path, 6), {"flip": 0.5, "prompt_dropout": 0.5}
    learner = new_learner(Halves())
    late = batch_of(stored(path, learner, **cfg), 3).examples
    straight = list(stored(path, learner, **cfg).batches(range(4)))[3].examples
    assert torch.equal(late["latents"], straight["latents"])
    assert torch.equal(late["cond"]["length"], straight["cond"]["length"])
    other = batch_of(stored(path, learner, seed=1, **cfg), 3).examples
    assert not torch.equal(late["latents"], other["latents"])


def test_held_out_pairs_are_read_apart_and_shown_without_mirrors_or_dropout(tmp_path):
    stream = stored(
        painted(tmp_path, 4),
        new_learner(),
        held_out=painted(tmp_path, 3, "shown"),
        flip=1.0,
        prompt_dropout=1.0,
        held_out_pairs=2,
    )
    examples = stream.held_out()
    assert_close(examples["latents"], rows_of(3)[[0, 1, 3, 4]])
    assert examples["cond"]["length"][:, 0].tolist() == [1, 2, 1, 2]
    assert stored(painted(tmp_path, 4), new_learner()).held_out() is None


def test_files_that_do_not_exist_are_refused_by_name(tmp_path):
    path, run = painted(tmp_path, 2), context(evaluates=True)
    StoredDataset(path=path).check(run)
    with pytest.raises(ValueError, match=r"no/train\.jsonl' does not exist"):
        StoredDataset(path="no/train.jsonl").check(run)
    with pytest.raises(ValueError, match=r"no/test\.jsonl' does not exist"):
        StoredDataset(path=path, held_out="no/test.jsonl").check(run)


def with_broken_rows(folder: Path, good: int, missing: int, ties: int) -> str:
    path = Path(painted(folder, good))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows += [rows[0] | {"chosen": f"gone{k}.png"} for k in range(missing)]
    rows += [rows[0] | {"chosen_score": 1, "rejected_score": 1, "id": f"t{k}"} for k in range(ties)]
    return jsonl(path, rows)


def test_too_many_unusable_rows_are_refused_with_counts_and_reasons(tmp_path):
    path = with_broken_rows(tmp_path, good=6, missing=2, ties=1)
    with pytest.raises(ValueError, match=r"3 of the 9 pairs of .*data\.jsonl are left") as e:
        stored(path, new_learner())
    message = str(e.value)
    assert "out, 2 of them unusable; recipe.data.max_dropped_fraction is 0.05" in message
    assert "2 missing file: data.jsonl row 7" in message
    assert "1 tie" in message
    assert len(message.splitlines()) <= 5


def test_as_many_as_are_allowed_are_dropped_and_told_in_a_note(tmp_path):
    path = with_broken_rows(tmp_path, good=6, missing=2, ties=1)
    messages = []
    stream = stored(path, new_learner(), log=messages.append, max_dropped_fraction=0.25)
    assert len(stream.examples) == 6
    (note,) = messages
    assert "3 of the 9 pairs" in note
    assert "2 missing file" in note


def test_ties_and_repeated_pairs_count_neither_for_nor_against_the_limit(tmp_path):
    path = Path(with_broken_rows(tmp_path, good=6, missing=0, ties=20))
    path.write_text(path.read_text() + path.read_text().splitlines()[0] + "\n")
    messages = []
    stream = stored(str(path), new_learner(), log=messages.append, max_dropped_fraction=0.0)
    assert len(stream.examples) == 6
    assert "21 of the 27 pairs" in messages[0]
    assert "0 of them unusable" in messages[0]
    path = with_broken_rows(tmp_path, good=6, missing=1, ties=20)
    with pytest.raises(ValueError, match="1 of them unusable"):  # a seventh, not one of 27
        stored(path, new_learner(), max_dropped_fraction=0.1)
    assert len(stored(path, new_learner(), max_dropped_fraction=0.15).examples) == 6


def test_nothing_usable_is_refused_whatever_is_allowed(tmp_path):
    path = with_broken_rows(tmp_path, good=1, missing=2, ties=0)
    lines = Path(path).read_text().splitlines()[1:]
    Path(path).write_text("\n".join(lines))
    with pytest.raises(ValueError, match="2 of the 2 pairs"):
        stored(path, new_learner(), max_dropped_fraction=1.0)


def test_media_that_cannot_be_encoded_are_dropped_too(tmp_path):
    class Picky(PixelPolicy):
        def embed(self, media):
            latent = super().embed(media)
            return latent.where(latent[:, :1] < 2, torch.nan)

    messages, learner = [], new_learner(Picky())
    path = painted(tmp_path, 6)
    stream = stored(path, learner, log=messages.append, max_dropped_fraction=0.9)
    red = torch.tensor([shade(k)[0][0] for k in range(6)]) / 255
    kept = int((red.logit() < 2).sum())
    assert 0 < kept < 6
    assert len(stream.examples) == kept
    assert f"{6 - kept} its latent is not finite" in messages[0]


def test_a_pair_loses_its_prompt_for_both_and_only_so_often(tmp_path):
    path = painted(tmp_path, 6)
    silent = batch_of(stored(path, new_learner(), prompt_dropout=1.0)).examples
    assert silent["cond"]["length"].tolist() == [[0.0]] * 8
    some = stored(path, new_learner(), prompt_dropout=0.3, batch_size=600)
    lengths = batch_of(some).examples["cond"]["length"][:, 0]
    assert torch.equal(lengths[:600], lengths[600:])
    assert float((lengths == 0).float().mean()) == pytest.approx(0.3, abs=0.06)
    steps = stored(path, new_learner(), prompt_dropout=0.5).batches(range(6))
    silenced = {tuple((b.examples["cond"]["length"][:4, 0] == 0).tolist()) for b in steps}
    assert len(silenced) > 2


def test_a_pair_is_mirrored_with_both_its_media(tmp_path):
    rows = []
    for k in range(3):
        red, blue = shade(k)
        names = paint(tmp_path, f"a{k}", red, blue), paint(tmp_path, f"b{k}", blue, (9, 99, k))
        rows.append({"prompt": "p" * (k + 1), "chosen": names[0], "rejected": names[1]})
    path = jsonl(tmp_path / "data.jsonl", rows)
    learner = new_learner(Halves())
    stream = stored(path, learner, flip=0.4, batch_size=300)
    plain = stored(path, learner, batch_size=300)
    seen, as_is = batch_of(stream).examples["latents"], batch_of(plain).examples["latents"]
    mirrored = (seen == as_is.flip(-1)).flatten(1).all(1)
    same = (seen == as_is).flatten(1).all(1)
    assert (mirrored ^ same).all()
    assert torch.equal(mirrored[:300], mirrored[300:])
    assert float(mirrored.float().mean()) == pytest.approx(0.4, abs=0.08)
    always = batch_of(stored(path, learner, flip=1.0, batch_size=300)).examples["latents"]
    assert torch.equal(always, as_is.flip(-1))


def test_samples_have_their_labels_and_no_partner(tmp_path):
    rows = [
        {"prompt": "p" * (k + 1), "image": paint(tmp_path, f"i{k}", shade(k)[0]), "label": k % 2}
        for k in range(4)
    ]
    path = jsonl(tmp_path / "data.jsonl", rows)
    shown = painted(tmp_path, 2, "shown")
    stream = stored(path, new_learner(), kind="samples", held_out=shown)
    batch = batch_of(stream)
    examples = batch.examples
    assert ("pair" in examples, batch.total, len(examples["latents"])) == (False, 4, 4)
    place = (examples["cond"]["length"][:, 0] - 1).long()
    assert examples["desirable"].tolist() == [bool(k % 2) for k in place.tolist()]
    assert_close(examples["latents"], rows_of(4)[place])
    assert "pair" in stream.held_out()
    learner = new_learner()
    (metrics,) = train(recipe(loss=KTO(beta=5.0)), learner, stream)
    assert metrics["check/loss_at_start"] == pytest.approx(0.5, abs=1e-6)
    found = measure_held_out(recipe(), learner, stream.held_out(), 0)
    assert found["eval/pairs/implicit_accuracy"] in (0.0, 0.5, 1.0)


def opened_for(needs: set, path: str, log=lambda _: None):
    cfg = StoredDataset(path=path, kind="samples", batch_size=4)
    return cfg.open(new_learner(), StreamContext(Rewards([], {}), 0, needs, log))


def test_a_loss_that_needs_labels_never_sees_a_sample_without_one(tmp_path):
    path = Path(painted(tmp_path, 3))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1] |= {"chosen_score": 1, "rejected_score": 1}
    jsonl(path, rows)
    messages = []
    stream = opened_for(KTO().needs, str(path), messages.append)
    assert sorted(unit.desirable for unit in stream.examples) == [False, False, True, True]
    assert "2 neither liked nor disliked" in messages[0]
    assert len(opened_for(SFT().needs, str(path)).examples) == 6


def test_a_plain_folder_is_fitted_and_not_taken_for_liked(tmp_path):
    for k in range(4):
        name = paint(tmp_path, f"i{k}", shade(k)[0])
        (tmp_path / name).with_suffix(".txt").write_text("p" * (k + 1))
    learner = new_learner()
    stream = opened_for(SFT().needs, str(tmp_path))
    (metrics,) = train(recipe(loss=SFT()), learner, stream)
    assert metrics["fitted"] == 1.0
    with pytest.raises(ValueError, match=r"4 of the 4 samples .*\n4 neither liked nor disliked"):
        opened_for(KTO().needs, str(tmp_path))


def test_settings_of_pairs_are_refused_for_samples():
    for wrong in ({"stage_steps": 3}, {"weighting": GapWeights(scores={"a": 1.0})}):
        with pytest.raises(ValueError, match=r"but kind is samples, not pairs"):
            StoredDataset(path="x", kind="samples", **wrong)


def test_numbers_that_no_dataset_can_have_are_refused_by_name():
    wrong = {
        "batch_size": 0,
        "held_out_pairs": 0,
        "flip": 1.5,
        "prompt_dropout": -0.1,
        "max_dropped_fraction": 2.0,
        "stage_steps": -1,
    }
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=rf"data\.{name} is {value}"):
            StoredDataset(path="x", **{name: value})


def test_stages_join_after_their_steps(tmp_path):
    path = painted(tmp_path, 6, stage=[0, 2, 0, 1, 2, 1])
    stream = stored(path, new_learner(), stage_steps=2, batch_size=3)
    seen = [
        {int(length) - 1 for length in batch.examples["cond"]["length"][:3, 0]}
        for batch in stream.batches(range(8))
    ]
    assert seen[0] | seen[1] == {0, 2}
    assert seen[2] | seen[3] == {0, 2, 3, 5}
    assert seen[4] | seen[5] == set(range(6))
    everything = stored(path, new_learner(), batch_size=6)
    assert len(batch_of(everything).examples["cond"]["length"].unique()) == 6


def test_pairs_weigh_what_their_scores_say(tmp_path):
    path = painted(
        tmp_path,
        3,
        scores_chosen=[{"a": 1.0, "b": 0.0}, {"a": 3.0, "b": 2.0}, {"a": 0.0, "b": 0.0}],
        scores_rejected=[{"a": 0.0, "b": 2.0}, {"a": 2.0, "b": 2.0}, {"a": 1.0, "b": 0.0}],
        weight=[1.0, 3.0, 1.0],
    )
    weighting = GapWeights(scores={"a": 1.0, "b": -0.5}, alpha=4.0)
    stream = stored(path, new_learner(), weighting=weighting)
    # a - b / 2: chosen 1, 2, 0; rejected -1, 1, 1; in [0, 1]: 2/3, 1, 1/3 and 0, 2/3, 2/3.
    weights = [unit.weight for unit in stream.examples]
    assert weights == pytest.approx([4 ** (2 / 3) - 1, 3 * (4 - 4 ** (2 / 3)), 0.0], rel=1e-5)
    examples = batch_of(stream).examples
    place = (examples["cond"]["length"][:, 0] - 1).long()
    assert_close(examples["weight"], tensor(weights)[place])


def test_weights_of_unknown_scores_are_refused_by_row(tmp_path):
    path = painted(tmp_path, 2, scores_chosen=[{"a": 1.0}] * 2, scores_rejected=[{"a": 0.0}] * 2)
    with pytest.raises(
        ValueError, match=r"jsonl row 1: .* needs a score that is missing, 'b'; there are a"
    ):
        stored(path, new_learner(), weighting=GapWeights(scores={"b": 1.0}))
    for wrong in ({"scores": {}}, {"scores": {"a": 1.0}, "alpha": 1.0}):
        with pytest.raises(ValueError, match=r"need at least one dimension, and alpha above 1"):
            GapWeights(**wrong)


# Order --------------------------------------------------------------------------------------------


def test_every_epoch_is_a_permutation_and_another_one():
    order = EpochSampler(3, [0] * 7)
    epochs = [order.batch(epoch, 7) for epoch in range(4)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_batches_cut_epochs_wherever_they_end():
    order = EpochSampler(3, [0] * 7)
    whole = [item for step in range(2) for item in order.batch(step, 7)]
    assert [item for step in range(7) for item in order.batch(step, 2)] == whole
    assert EpochSampler(3, [0] * 7).batch(4, 2) == whole[8:10]
    assert EpochSampler(4, [0] * 7).batch(0, 7) != whole[:7]


def test_only_what_has_joined_is_available_and_then_an_epoch_of_all_begins():
    order = EpochSampler(0, [0, 4, 0, 4, 0])
    early = [item for step in range(4) for item in order.batch(step, 3)]
    assert Counter(early) == Counter({0: 4, 2: 4, 4: 4})
    late = [item for step in range(4, 9) for item in order.batch(step, 3)]
    assert [Counter(late[i : i + 5]) for i in (0, 5, 10)] == [Counter(range(5))] * 3


@pytest.mark.parametrize("since", [[2, 3], []])
def test_a_first_step_without_pairs_is_refused(since):
    with pytest.raises(ValueError, match="no pair is available at the first step"):
        EpochSampler(0, since)


# Builder ------------------------------------------------------------------------------------------


class Ready(LatentCache):
    """Latents that are there by their path."""

    def __init__(self, *shape: int):
        g = torch.Generator().manual_seed(2)
        self.table = {name: torch.randn(shape, generator=g) for name in "abcd"}

    def read(self, media, flipped):
        found = [self.table[m.path] for m in media]
        return torch.stack([x.flip(-1) if f else x for x, f in zip(found, flipped, strict=True)])


def built(units, *shape: int, of=None, **how):
    """Examples of some pairs, all of the dataset unless told otherwise."""
    texts = PromptEmbeddingCache(PixelPolicy(), None)
    texts.prepare(plain_requests(["", "p", "qq"]))
    return Collator(Ready(*shape), texts, of or units).build(units, **how)


def test_a_loss_that_needs_masks_refuses_data_without_any():
    pair = Pair(sample("a"), sample("b"))
    texts = PromptEmbeddingCache(PixelPolicy(), None)
    plain = Collator(Ready(), texts, [pair])
    with pytest.raises(ValueError, match=r"recipe.loss needs masks; no row of pairs.jsonl has any"):
        plain.check(LocalDPO().needs, "pairs.jsonl")
    plain.check(DPO().needs, "pairs.jsonl")
    masked = [pair, replace(pair, mask="m.safetensors")]
    Collator(Ready(), texts, masked).check(LocalDPO().needs, "pairs.jsonl")


def sample(name: str, prompt: str = "p", **known) -> Sample:
    return Sample(prompt, Media(name), **known)


def two_pairs(first: dict | None = None, second: dict | None = None) -> list[Pair]:
    one = Pair(
        **{"chosen": sample("a"), "rejected": sample("b"), "where": "x row 1"} | (first or {})
    )
    chosen, rejected = sample("c", "qq"), sample("d", "qq")
    return [one, Pair(**{"chosen": chosen, "rejected": rejected} | (second or {}))]


def test_segments_are_labels_of_latent_frames_and_pairs_without_any_are_the_winners_throughout():
    segments = [Segment(0, 2, -1), Segment(3, 4, 1)]
    examples = built(two_pairs({"segments": segments}), 2, 5, 1, 2)
    winners, losers = examples["segments"].chunk(2)
    assert winners.tolist() == [[-1, -1, 0, 1, 0], [1, 1, 1, 1, 1]]
    assert torch.equal(losers, -winners)
    assert "segments" not in built(two_pairs(), 2, 5, 1, 2)


def test_a_segment_beyond_the_last_frame_is_refused_by_row():
    pairs = two_pairs({"segments": [Segment(1, 6, 1)]})
    with pytest.raises(ValueError, match="x row 1: segment 1 to 6 lies outside the 5 latent"):
        built(pairs, 2, 5, 1, 2)


def write_map(folder: Path, name: str, values: torch.Tensor) -> str:
    path = folder / f"{name}.safetensors"
    save_file({"map": values.contiguous()}, path)
    return str(path)


def test_a_mask_is_averaged_onto_the_latent_grid_for_both_and_mirrored_with_them(tmp_path):
    mask = tensor([[1.0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 2, 2], [0, 0, 2, 6]])
    pairs = two_pairs({"mask": write_map(tmp_path, "m", mask)})
    wanted = tensor([[[0.75, 0.0], [0.0, 3.0]]])
    examples = built(pairs, 3, 2, 2)
    ones = torch.ones(1, 2, 2)
    assert_close(examples["region"], torch.stack([wanted, ones, wanted, ones]))
    mirrored = built(pairs, 3, 2, 2, flips=[True, False])
    flipped = tensor([[[0.0, 0.75], [3.0, 0.0]]])
    assert_close(mirrored["region"], torch.stack([flipped, ones, flipped, ones]))
    assert torch.equal(mirrored["latents"][0], examples["latents"][0].flip(-1))
    assert torch.equal(mirrored["latents"][1], examples["latents"][1])


def test_a_mask_of_a_video_is_averaged_over_frames_too(tmp_path):
    mask = torch.zeros(4, 1, 2)
    mask[1, 0, 1] = 8.0
    pairs = two_pairs(second={"mask": write_map(tmp_path, "m", mask)})
    examples = built(pairs, 2, 2, 1, 2)
    assert_close(examples["region"][1], tensor([[[[0.0, 4.0]], [[0.0, 0.0]]]]))
    assert torch.equal(examples["region"][3], examples["region"][1])


def test_weight_maps_are_each_mediums_own_and_of_mean_1(tmp_path):
    uneven, even = tensor([[1.0, 3.0], [0.0, 0.0]]), tensor([[5.0, 5.0], [5.0, 5.0]])
    files = write_map(tmp_path, "w", uneven), write_map(tmp_path, "v", even)
    pairs = two_pairs(
        {"chosen": sample("a", weight_map=files[0]), "rejected": sample("b", weight_map=files[1])}
    )
    maps = built(pairs, 3, 2, 2, flips=[True, True])["weight_map"]
    assert_close(maps[0], tensor([[[3.0, 1.0], [0.0, 0.0]]]))
    assert_close(maps[1:], torch.ones(3, 1, 2, 2))


def test_maps_that_are_none_are_refused(tmp_path):
    wrong = {
        "must hold one tensor with 2 axes": torch.ones(3, 2, 2),
        "finite numbers of at least 0": tensor([[1.0, -0.5]]),
        "not all 0": torch.zeros(2, 2),
        "finite numbers": tensor([[1.0, torch.inf]]),
    }
    for k, (said, values) in enumerate(wrong.items()):
        with pytest.raises(ValueError, match=said):
            read_map(write_map(tmp_path, f"m{k}", values), (2, 2))
    for name in ("no.safetensors", "map.pt"):
        with pytest.raises(ValueError, match="is not an existing safetensors file"):
            read_map(str(tmp_path / name), (2, 2))


def test_scores_users_and_weights_of_pairs_belong_to_their_rows():
    pairs = two_pairs(
        {"chosen": sample("a", scores={"x": 1.5, "y": 2.0}), "weight": 0.5, "user": "u"},
        {"rejected": sample("d", "qq", scores={"x": -3.0}), "weight": 2.0},
    )
    examples = built(pairs, 3, 2, 2, drop_prompt=[False, True])
    nan = torch.nan
    assert_close(examples["scores"]["x"], tensor([1.5, nan, nan, -3.0]), equal_nan=True)
    assert_close(examples["scores"]["y"], tensor([2.0, nan, nan, nan]), equal_nan=True)
    assert examples["weight"].tolist() == [0.5, 2.0, 0.5, 2.0]
    assert list(examples["user"]) == ["u", "", "u", ""]
    assert examples["cond"]["length"][:, 0].tolist() == [1, 0, 1, 0]


def test_a_batch_has_what_any_pair_of_the_dataset_has_and_is_filled_where_it_has_not(tmp_path):
    threes = write_map(tmp_path, "m", torch.full((5, 1, 2), 3.0))
    chosen = sample("a", scores={"x": 1.5}, weight_map=threes)
    one = {"segments": [Segment(0, 1, -1)], "mask": threes, "chosen": chosen, "user": "u"}
    pairs = two_pairs(one)
    plain = built(pairs[1:], 2, 5, 1, 2, of=pairs)
    assert plain["segments"].tolist() == [[1.0] * 5, [-1.0] * 5]
    assert torch.equal(plain["region"], torch.ones(2, 1, 5, 1, 2))
    assert plain["region_strength"].tolist() == [1.0, 1.0]
    assert torch.equal(plain["weight_map"], torch.ones(2, 1, 5, 1, 2))
    assert plain["scores"]["x"].isnan().tolist() == [True, True]
    assert list(plain["user"]) == ["", ""]
    alone = built(pairs[1:], 2, 5, 1, 2)
    assert {*alone} == {"latents", "cond", "weight", "desirable", "pair"}


def test_batches_of_a_file_with_some_scores_and_segments_are_all_alike(tmp_path):
    known = {
        "segments": [[{"start": 0, "stop": 1, "label": -1}], None, None, None],
        "scores_chosen": [{"a": 2.0}, None, None, None],
        "scores_rejected": [{"a": 1.0}, None, None, None],
        "user_id": ["u", None, None, None],
    }
    stream = stored(
        painted(tmp_path, 4, **known),
        new_learner(),
        batch_size=1,
        held_out=painted(tmp_path, 2, "shown"),
    )
    batches = [batch.examples for batch in stream.batches(range(4))]
    assert sorted(float(b["segments"][0]) for b in batches) == [-1.0, 1.0, 1.0, 1.0]
    assert sum(int(b["scores"]["a"].isnan().all()) for b in batches) == 3
    assert [len(b["user"]) for b in batches] == [2] * 4
    shown = stream.held_out()
    assert not {"segments", "scores", "user"} & {*shown}


# Rollouts -----------------------------------------------------------------------------------------


class Told(RewardModel):
    """Scores from a function of pixels [n, 3] and prompts."""

    def __init__(self, score, *dims: str):
        self.given = score
        self.spec = RewardSpec("told", dims or ("told",), "image", (-9.0, 9.0), "Apache-2.0")

    def score(self, batch):
        return RewardOutput.build(self.spec, self.given(batch.media[:, 0, :, 0, 0], batch.prompts))


@pytest.fixture
def prompts(tmp_path) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text("a\nbb\nccc\ndddd\neeeee\n")
    return str(path)


def source(prompts: str, **changes) -> Rollouts:
    given = {"prompts": prompts, "prompts_per_step": 3, "samples_per_prompt": 4}
    return Rollouts(**given | {"num_steps": 3, "micro_batch": 5} | changes)


def opened(prompts: str, rewards: Rewards, learner=None, seed: int = 0, **changes):
    cfg = source(prompts, **changes)
    return cfg.open(learner or new_learner(), StreamContext(rewards, seed))


def sampled(stream, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """All samples of a step, made again: latents and pixels, [P, K, 3]."""
    cfg, asked = stream.cfg, stream.requests.batch(step, stream.cfg.prompts_per_step)
    count = cfg.sampling.samples_per_prompt
    seeds = [
        generator(stream.requests.seed, "rollout", step, i, k)
        for i in range(len(asked))
        for k in range(count)
    ]
    repeated = [request for request in asked for _ in range(count)]
    policy = stream.learner.policy
    with torch.no_grad():
        latents = generate(policy, repeated, cfg.sampling.num_steps, seeds, 64)
    pixels = policy.decode(latents)[:, 0, :, 0, 0]
    return latents.unflatten(0, (-1, count)), pixels.unflatten(0, (-1, count))


def test_the_best_of_each_prompt_is_compared_with_the_worst_by_weighted_reward(prompts):
    rewards = Rewards([Redness()], {"redness": 0.3, "green": -2.0})
    stream = opened(prompts, rewards)
    batch = batch_of(stream)
    latents, pixels = sampled(stream)
    total = 0.3 * (pixels[..., 0] - pixels[..., 2]) - 2 * pixels[..., 1]
    best, worst = total.argmax(1), total.argmin(1)
    every = torch.arange(3)
    assert_close(
        batch.examples["latents"], torch.cat([latents[every, best], latents[every, worst]])
    )
    assert (total[every, best] != (pixels[..., 0] - pixels[..., 2]).amax(1)).all()
    green = torch.cat([pixels[every, best, 1], pixels[every, worst, 1]])
    assert_close(batch.examples["scores"]["green"], green)
    asked = stream.requests.batch(0, 3)
    lengths = [float(len(request.prompt)) for request in asked] * 2
    assert batch.examples["cond"]["length"][:, 0].tolist() == lengths
    assert (batch.first, batch.total, batch.metrics["pairs"]) == (0, 3, 3)
    assert batch.examples["desirable"].tolist() == [True] * 3 + [False] * 3
    assert not batch.examples["latents"].requires_grad
    assert stream.held_out() is None


def test_what_a_batch_has_shown_is_said_of_all_samples(prompts):
    stream = opened(prompts, Rewards([Redness()], {"green": 2.0}))
    metrics, (_, pixels) = batch_of(stream).metrics, sampled(stream)
    red = pixels[..., 0] - pixels[..., 2]
    assert metrics == pytest.approx(
        {
            "reward/redness": float(red.mean()),
            "reward/green": float(pixels[..., 1].mean()),
            "reward_mean": 2 * float(pixels[..., 1].mean()),
            "reward_std": 2 * float(pixels[..., 1].std(correction=0)),
            "reward_invalid": 0.0,
            "zero_std_ratio": 0.0,
            "pairs": 3.0,
        },
        abs=1e-5,
    )


def test_prompts_whose_samples_are_equally_good_give_no_pair(prompts):
    def score(pixels, texts):
        return torch.stack(
            [
                pixel[0] if "b" in text else tensor(0.7)
                for pixel, text in zip(pixels, texts, strict=True)
            ]
        )[:, None]

    stream = opened(prompts, Rewards([Told(score)], {"told": 1.0}), prompts_per_step=5)
    batch = batch_of(stream)
    assert batch.total == 1
    assert batch.examples["cond"]["length"].tolist() == [[2.0], [2.0]]


def test_where_nothing_differs_a_step_makes_no_update_and_the_run_goes_on(prompts):
    rewards = Rewards([Told(lambda pixels, _: torch.ones(len(pixels), 1))], {"told": 1.0})
    learner = new_learner()
    before = flat(learner.policy.denoiser)
    metrics = train(recipe(), learner, opened(prompts, rewards, learner), steps=2)
    assert [m["pairs"] for m in metrics] == [0, 0]
    assert learner.num_updates == 0
    assert torch.equal(flat(learner.policy.denoiser), before)


def test_samples_whose_reward_failed_never_take_part(prompts):
    def score(pixels, texts):
        value = pixels[:, 0] - pixels[:, 2]
        failed = (value > value.median()) | tensor(["a" in text for text in texts])
        return torch.stack([value.masked_fill(failed, torch.nan), pixels[:, 1]], 1)

    rewards = Rewards([Told(score, "told", "green")], {"told": 1.0})
    stream = opened(
        prompts,
        rewards,
        prompts_per_step=5,
        rule=Gap(),
        on_failed_reward="drop_sample",
        micro_batch=64,
    )
    batch, (latents, pixels) = batch_of(stream), sampled(stream)
    value = (pixels[..., 0] - pixels[..., 2]).flatten()
    known = (value <= value.median()).unflatten(0, (5, 4))
    known &= tensor([[request.prompt != "a"] for request in stream.requests.batch(0, 5)])
    allowed = {tuple(row) for row in latents[known].tolist()}
    rows = {tuple(row) for row in batch.examples["latents"].tolist()}
    assert rows
    assert rows <= allowed
    count = known.sum(1)
    assert batch.total == int((count * (count - 1) // 2).sum())
    assert batch.metrics["reward_invalid"] == pytest.approx(1 - float(known.float().mean()))
    assert batch.examples["scores"]["told"].isfinite().all()


def test_with_every_reward_failed_there_is_no_mean_and_no_pair(prompts):
    rewards = Rewards([Redness(fail_on="")], {"redness": 1.0})
    batch = batch_of(opened(prompts, rewards, on_failed_reward="drop_sample"))
    assert batch.total == 0
    assert batch.metrics["reward_invalid"] == 1
    assert batch.metrics["reward_mean"] != batch.metrics["reward_mean"]


def test_a_failed_reward_that_weighs_nothing_excludes_nobody(prompts):
    def score(pixels, _):
        return torch.stack([pixels[:, 0], torch.full((len(pixels),), torch.nan)], 1)

    rewards = Rewards([Told(score, "red", "broken")], {"red": 1.0})
    batch = batch_of(opened(prompts, rewards))
    assert (batch.total, batch.metrics["reward_invalid"]) == (3, 0)


def test_dominance_asks_that_no_weighed_dimension_is_worse_as_its_weight_says(prompts):
    rewards = Rewards([Redness()], {"redness": 1.0, "green": -0.01})
    stream = opened(prompts, rewards, rule=Dominance(), samples_per_prompt=6)
    batch, (_, pixels) = batch_of(stream), sampled(stream)
    red, green = pixels[..., 0] - pixels[..., 2], pixels[..., 1]
    better = (red[:, :, None] >= red[:, None]) & (green[:, :, None] <= green[:, None])
    total = red - 0.01 * green
    better &= total[:, :, None] > total[:, None]
    assert batch.total == int(better.sum())
    assert 0 < batch.total < 3 * 15
    scores = batch.examples["scores"]
    for dim, sign in (("redness", 1), ("green", -1)):
        winner, loser = (sign * scores[dim]).chunk(2)
        assert (winner >= loser).all()


@pytest.mark.parametrize(("rule", "most"), [(BestWorst(), 1), (Gap(), 6), (Dominance(), 6)])
def test_a_step_has_at_most_as_many_pairs_as_its_rule_makes(prompts, rule, most):
    cfg = Rollouts(prompts=prompts, prompts_per_step=3, samples_per_prompt=4, rule=rule)
    assert cfg.examples_per_step == 3 * most
    stream = opened(prompts, Rewards([Redness()], {"redness": 1.0}), rule=rule)
    assert batch_of(stream).total == 3 * most


def test_a_batch_is_a_function_of_seed_step_and_policy_alone(prompts):
    rewards, learner = Rewards([Redness()], {"redness": 1.0}), new_learner()
    late = batch_of(opened(prompts, rewards, learner), 2).examples
    straight = list(opened(prompts, rewards, learner).batches(range(3)))[2].examples
    assert torch.equal(late["latents"], straight["latents"])
    others = [
        batch_of(opened(prompts, rewards, learner, seed=1), 2),
        batch_of(opened(prompts, rewards, learner), 1),
        batch_of(opened(prompts, rewards, new_learner(PixelPolicy(seed=3))), 2),
    ]
    for other in others:
        assert not torch.equal(other.examples["latents"], late["latents"])


def test_a_run_costs_what_the_plan_says(prompts):
    learner_policy = PixelPolicy()
    costs = Costs()
    costs.count(learner_policy.denoiser)
    learner = new_learner(learner_policy)
    rewards = Rewards([Redness()], {"redness": 1.0}, costs=costs)
    stream = opened(prompts, rewards, learner, rule=Gap())
    cfg = recipe(updates_per_step=2, epochs_per_step=3)
    train(cfg, learner, stream, steps=2)
    plan = source(prompts, rule=Gap()).plan(context(rewards=rewards), learner.policy.plan(), 1)
    assert plan.rows["samples per step"] == "12 = 3 prompts x 4"
    assert plan.rows["pairs per step"] == "at most 18"
    sampling, calls = plan.work.count("sampling"), plan.work.reward_calls
    assert (sampling, calls) == (12 * 3, 12)
    matching = 18 * 2 * 3  # all pairs, both media, three epochs
    assert costs.training_evaluations == 2 * matching
    assert costs.sampling_evaluations == 2 * (sampling + matching)
    assert costs.reward_calls == 2 * calls
    assert costs.decodes == 2 * 12


def test_samples_become_redder_by_comparing_them(prompts):
    learner = new_learner()
    stream = opened(prompts, Rewards([Redness()], {"redness": 1.0}), learner, prompts_per_step=5)
    metrics = train(recipe(), learner, stream, steps=25)
    assert metrics[-1]["reward_mean"] > metrics[0]["reward_mean"] + 0.15


def test_rollouts_that_compare_nothing_are_refused(prompts):
    cfg = Rollouts(prompts=prompts)
    with pytest.raises(ValueError, match="no reward has a weight other than 0"):
        cfg.check(context(rewards=Rewards([Redness()], {"redness": 0.0})))
    cfg.check(context(rewards=Rewards([Redness()], {"redness": 1.0})))
    with pytest.raises(ValueError, match="samples_per_prompt is 1, so a group"):
        Rollouts(prompts=prompts, samples_per_prompt=1)
    for name in ("prompts_per_step", "num_steps", "micro_batch"):
        with pytest.raises(ValueError, match=rf"data\.{name} is 0"):
            Rollouts(prompts=prompts, **{name: 0})


def test_fewer_prompts_than_processes_are_refused(prompts):
    cfg = Rollouts(prompts=prompts, prompts_per_step=1, samples_per_prompt=4, rule=Gap())
    rewards, two = Rewards([Redness()], {"redness": 1.0}), Processes(0, 2, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"data\.prompts_per_step is 1, fewer than the 2"):
        cfg.open(new_learner(processes=two), StreamContext(rewards, 0))


# Two processes ------------------------------------------------------------------------------------

DPO_RECIPE = {"loss": DPO(beta=AutoBeta(low=0.1)), "updates_per_step": 2, "micro_batch": 2}


def _stored(folder: Path, processes: Processes):
    cfg = recipe(
        **DPO_RECIPE, reference=EMAReference(decay=0.8), sft=0.1, kl=0.2, epochs_per_step=2
    )
    learner = new_learner(processes=processes)
    learner.fields["reference"] = cfg.reference.field(learner)
    path, shown = str(folder / "data.jsonl"), str(folder / "shown.jsonl")
    stream = stored(
        path,
        learner,
        batch_size=5,
        flip=0.5,
        prompt_dropout=0.5,
        held_out=shown,
        cache=str(folder / f"cache{processes.world}"),
    )
    loss_state: dict[str, float] = {}
    metrics = train(cfg, learner, stream, 3, loss_state=loss_state)
    return learner, metrics, measure_held_out(cfg, learner, stream.held_out(), 0), loss_state


def _samples(folder: Path, processes: Processes):
    learner = new_learner(processes=processes)
    stream = stored(str(folder / "data.jsonl"), learner, kind="samples", batch_size=5)
    loss_state: dict[str, float] = {}
    metrics = train(recipe(loss=KTO(beta=5.0)), learner, stream, 3, loss_state=loss_state)
    return learner, metrics, {}, loss_state


def _rollouts(folder: Path, processes: Processes, **changes):
    """Some steps have a pair of one process only, some updates none of a process."""
    learner = new_learner(processes=processes)
    cfg = Rollouts(
        prompts=str(folder / "prompts.txt"),
        prompts_per_step=2,
        samples_per_prompt=4,
        num_steps=3,
        micro_batch=3,
        on_failed_reward="drop_sample",
    )
    rewards = Rewards([Redness(fail_on="ab")], {"redness": 1.0})
    loss_state: dict[str, float] = {}
    stream = cfg.open(learner, StreamContext(rewards, 0))
    metrics = train(recipe(**changes), learner, stream, 4, loss_state=loss_state)
    assert {m["pairs"] for m in metrics} == {1, 2}
    return learner, metrics, {}, loss_state


def _rollouts_rows(folder: Path, processes: Processes):
    return _rollouts(folder, processes, loss=KTO(beta=5.0))


def _rollouts_pairs(folder: Path, processes: Processes):
    return _rollouts(folder, processes, **DPO_RECIPE)


def _step_pairs(folder: Path, processes: Processes):
    """Pairs of single steps, weighted by their lead over the mean of all processes."""
    learner = new_learner(processes=processes)
    cfg = Rollouts(
        prompts=str(folder / "prompts.txt"),
        prompts_per_step=3,
        samples_per_prompt=4,
        num_steps=3,
        credit=Gain(),
    )
    stream = cfg.open(learner, StreamContext(Rewards([Redness()], {"redness": 1.0}), 0))
    times = SamplerGrid(num_steps=3, distinct=True)
    metrics = train(recipe(times=times, times_per_sample=2), learner, stream, 2)
    assert {m["pair_steps"] for m in metrics} == {6}
    return learner, metrics, {}, {}


RUNS = {f.__name__: f for f in (_stored, _samples, _rollouts_pairs, _rollouts_rows, _step_pairs)}


def _made(name: str, folder: Path, processes: Processes):
    learner, metrics, shown, loss_state = RUNS[name](folder, processes)
    found = flat(learner.policy.denoiser), [*untimed(metrics), shown]
    return *found, loss_state, learner.num_updates


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    painted(folder, 7)
    painted(folder, 3, "shown")
    (folder / "prompts.txt").write_text("ab\ndd\nccc\neeee\n")
    return folder, results_of_two(_made, RUNS, folder)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.slow
def test_two_processes_make_the_updates_and_metrics_of_one(on_two, name):
    folder, results = on_two
    both, alone = results(name), _made(name, folder, ALONE)
    assert_two_equal_one(both, alone)
    loss_state, updates = both[0][2:]
    assert updates == alone[3] > 0
    assert loss_state == pytest.approx(alone[2], rel=1e-4)
