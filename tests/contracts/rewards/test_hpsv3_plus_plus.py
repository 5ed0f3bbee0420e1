"""HPSv3++ against its original code, and what every reward promises."""

import json
from dataclasses import replace

import pytest
import torch

from flowalign.types import MediaBatch
from reward_models.backbones.pixels import resize
from reward_models.preference import hpsv3
from reward_models.preference.hpsv3 import Capability, HPSv3PlusPlus, resize_twice
from tests.fixtures.golden import GOLDEN, check_chats, load, recorded_picture
from tests.fixtures.reward_contract import (
    check_contract,
    check_fingerprints,
    check_keys,
    check_small_steps,
    example_batch,
)

torch.set_num_threads(1)
FOLDER = GOLDEN / "H_hpsv3pp"
RECORDED = load("H_hpsv3pp_io")
PROMPTS = json.loads((GOLDEN / "H_hpsv3pp_io.json").read_text())["values"]["prompts"]


def tiny(checkpoint=FOLDER, **settings):
    settings = {"dtype": "float32", "device": "cpu", "batch_size": 1} | settings
    return HPSv3PlusPlus(str(checkpoint), str(FOLDER / "base"), **settings)


def recorded(i):
    return MediaBatch(recorded_picture(RECORDED, i), [PROMPTS[i]])


@pytest.fixture(scope="module")
def features():
    """The hidden states of the recorded images, and the head."""
    model = tiny()
    model.load()
    mark = model.tokenizer.convert_tokens_to_ids("<|Reward|>")
    chats = [model._chat(recorded(i), 0) for i in range(4)]
    return torch.cat([model.network.hidden([c], [mark], "image")[:, 0] for c in chats]), model


@pytest.mark.slow
def test_tokens_and_pixels_are_those_of_the_original(features):
    chats = [features[1]._chat(recorded(i), 0) for i in range(4)]
    check_chats(chats, RECORDED, "image_grid_thw")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "groups", "iteration"),
    [
        ("logits_image", [0, 1, 2, 3], 0.0),
        ("logits_image_late", [9, 2, 4, 7], 0.65),
        ("logits_group", RECORDED["groups"].tolist(), 0.0),
        ("logits_batch", [5, 5, 5, 5], 0.0),
    ],
)
def test_scores_are_those_of_the_original(features, name, groups, iteration):
    hidden, model = features
    got = model.network.head(hidden, torch.tensor(groups), iteration)
    torch.testing.assert_close(got, RECORDED[name], atol=2e-5, rtol=0)


def test_sizes_are_rounded_to_28_and_then_to_32():
    """By hand: 56 x 80 becomes 392 x 560 of at least 200,704 pixels, and that 384 x 576."""
    assert resize_twice(recorded(0).media[0]).shape == (1, 3, 384, 576)


def test_the_reward_scores_like_the_original_end_to_end():
    for i in (1, 2):  # only the first is resized twice
        output = tiny(iteration=0.65).score(recorded(i))
        got = torch.cat([output.values[0], output.uncertainty[0].log()])
        torch.testing.assert_close(got, RECORDED["logits_image_late"][i], atol=2e-5, rtol=0)


def test_capability_is_pooled_within_each_group_by_hand():
    """By hand: features 0 and ln 3 pool with weights 1/4 and 3/4 to .75 ln 3; 2 is alone."""
    encoder = Capability(1, 1)
    for layer in (encoder.proj, encoder.pool_attn, encoder.out_proj):
        torch.nn.init.ones_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
    log3 = torch.tensor(3.0).log()
    got = encoder(torch.tensor([[0.0], [2.0], [log3]]), torch.tensor([4, 8, 4]))
    expected = torch.stack([0.75 * log3, torch.tensor(2.0), 0.75 * log3]).sigmoid()
    torch.testing.assert_close(got, expected)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(hpsv3, "PLUS_PLUS_INSTRUCTION", "\nRate {prompt}: <|Reward|>\n")
    monkeypatch.setattr(hpsv3, "PIXELS", 64 * 64)
    monkeypatch.setattr(hpsv3, "BOUNDS", (32 * 32, 96 * 96))


@pytest.mark.slow
def test_what_every_reward_promises(small, monkeypatch):
    model, batch = tiny(batch_size=2), example_batch(3)
    model.load()
    out = model.network.head.cap_encoder.out_proj
    out.weight.div_(20)  # far from linear as it was recorded
    out.bias.zero_()
    check_contract(model, batch, rtol_gradient=3)  # its size is checked without rounding
    monkeypatch.setattr(hpsv3, "resize", lambda x, h, w, quantised: resize(x, h, w))
    check_small_steps(model, batch, 1e-5)


def test_other_groups_do_not_move_a_score_and_its_own_members_do(small):
    model = tiny(capability="group", batch_size=2)
    model.load()
    bias = model.network.head.cap_encoder.out_proj.bias
    bias.copy_(torch.tensor([26.5]))  # capabilities of these images away from 0 and 1
    batch = replace(example_batch(4), groups=[6, 2, 6, 2])
    values = model.score(batch).values
    pair = model.score(batch.take([2, 0])).values
    torch.testing.assert_close(pair, values[[2, 0]], atol=1e-5, rtol=0)
    alone = model.score(batch.take([0])).values
    assert (alone - values[0]).abs() > 1e-3
    with pytest.raises(ValueError, match="groups"):
        model.score(example_batch(2))


def test_a_failed_image_leaves_its_group_to_the_others(small):
    model = tiny(capability="group")
    batch = replace(example_batch(3), groups=[1, 1, 1])
    bad = replace(batch, prompts=[batch.prompts[0], "a <|Reward|>", batch.prompts[2]])
    output = model.score(bad)
    assert output.reasons == {1: "its prompt contains the special token <|Reward|>"}
    expected = model.score(batch.take([0, 2])).values
    torch.testing.assert_close(output.values[[0, 2]], expected, atol=1e-5, rtol=0)


def test_a_checkpoint_that_does_not_fit_is_refused_by_key(tmp_path):
    tensors = torch.load(FOLDER / "hpsv3++.pth", weights_only=True)["model"]
    torch.save(tensors, tmp_path / "hpsv3++.pth")
    check_keys(tmp_path / "hpsv3++.pth", "film_gen.2.bias", tiny(tmp_path).load)


def test_another_base_is_refused_and_settings_enter_the_fingerprint():
    other = FOLDER.parent / "H_hpsv3" / "base"
    with pytest.raises(ValueError, match="is of type 'qwen2_vl', not qwen3_vl"):
        HPSv3PlusPlus(str(FOLDER), str(other)).load()
    check_fingerprints([tiny(), tiny(capability="group"), tiny(iteration=0.3)])
