"""InternVL2 in transformers' native classes against the code that MJ-VIDEO carries."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import InternVLModel

from flowalign.types import MediaBatch
from flowalign.utils.files import read_object
from reward_models.backbones.pixels import IMAGENET_MEAN, IMAGENET_STD
from reward_models.preference import internvl2
from reward_models.preference.internvl2 import (
    InternVL2,
    convert_config,
    convert_tensors,
    split_wqkv,
)
from reward_models.preference.mj_video import MJVideo
from tests.fixtures.golden import GOLDEN, load
from tests.fixtures.reward_contract import (
    check_contract,
    check_fingerprints,
    check_keys,
    example_batch,
)

torch.set_num_threads(1)
FOLDER = GOLDEN / "H_mjvideo"
RECORDED = load("H_mjvideo_io")
VALUES = json.loads((GOLDEN / "H_mjvideo_io.json").read_text())["values"]
SIDE = 56


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The tiny model's image size, and what its tokenizer of bytes writes at the end of a turn."""
    monkeypatch.setattr(internvl2, "SIDE", SIDE)
    monkeypatch.setattr(internvl2, "TURN", tuple(VALUES["turn"]))


def tiny(checkpoint=FOLDER, base=FOLDER / "base", dtype="float32", **settings):
    reader = InternVL2(str(base), dtype=dtype)
    settings = {"gate_width": 12, "device": "cpu"} | settings
    return MJVideo(reader, str(checkpoint), **settings)


@pytest.fixture(scope="module")
def network():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(internvl2, "SIDE", SIDE)
        patch.setattr(internvl2, "TURN", tuple(VALUES["turn"]))
        model = tiny()
        model.load()
    return model.network


def film(i):
    """A video of 9 frames that contains the recorded 8."""
    frames = RECORDED[f"frames{i}"].float() / 255
    return torch.cat([frames, torch.zeros_like(frames[:1])])[None]


@pytest.mark.parametrize("i", range(2))
def test_scores_are_those_of_the_original(i):
    model = tiny(criteria=True)
    dims = model.spec.dims
    assert (dims[6], dims[11], dims[33]) == ("alignment_object", "safety_crime", "fairness_gender")
    output = model.score(MediaBatch(film(i), [VALUES["prompts"][i]]))
    parts = [RECORDED[f"{name}{i}"].flatten() for name in ("aspects", "overall", "criteria")]
    torch.testing.assert_close(output.values[0], torch.cat(parts), atol=2e-5, rtol=0)


def test_tokens_and_hidden_states_are_those_of_the_original(network):
    mean, std = (torch.tensor(x)[:, None, None] for x in (IMAGENET_MEAN, IMAGENET_STD))
    frames = torch.stack([(film(i)[0, :8] - mean) / std for i in range(2)])
    reader = network["reader"]
    last, turn = reader(frames, VALUES["prompts"])  # both in one batch, one padded
    for i in range(2):
        torch.testing.assert_close(last[i], RECORDED[f"hidden{i}"], atol=2e-5, rtol=0)
        torch.testing.assert_close(turn[i], RECORDED[f"turn{i}"], atol=2e-5, rtol=0)
        ids = reader._ids(VALUES["prompts"][i], 8, tokens=RECORDED[f"vision{i}"].shape[1])
        assert ids.tolist() == RECORDED[f"ids{i}"].tolist()
        seen = reader.backbone.get_image_features(frames[i]).pooler_output
        torch.testing.assert_close(seen, RECORDED[f"vision{i}"], atol=2e-5, rtol=0)


def test_the_reader_sees_eight_normalised_frames():
    seen = []
    model = tiny()
    model.load()
    model.network["reader"].register_forward_pre_hook(lambda _, args: seen.append(args))
    media = torch.zeros(1, 17, 3, 6, 10)
    media[0, 2] = 1  # the second of 0, 2, 4 ...
    model.score(MediaBatch(media, ["a cat"]))
    ((frames, prompts),) = seen
    assert (frames.shape, list(prompts)) == ((1, 8, 3, SIDE, SIDE), ["a cat"])
    mean, std = torch.tensor(IMAGENET_MEAN), torch.tensor(IMAGENET_STD)
    black, white = frames[0, 0, :, 0, 0], frames[0, 1, :, 0, 0]
    torch.testing.assert_close(black, -mean / std)
    torch.testing.assert_close(white - black, 1 / std)


def test_half_precision_keeps_the_head_exact():
    half = tiny(dtype="bfloat16")
    output = half.score(MediaBatch(film(0), [VALUES["prompts"][0]]))
    dtypes = {name: p.dtype for name, p in half.network.named_parameters()}
    assert dtypes["head.regression_layer.weight"] == torch.float32
    assert dtypes["reader.backbone.language_model.norm.weight"] == torch.bfloat16
    assert output.values[0, 5].item() == pytest.approx(RECORDED["overall0"].item(), abs=0.05)


def test_packed_attention_is_split_by_groups_by_hand():
    """Two groups of three heads of queries, of size 1: rows q q q k v, twice."""
    packed = torch.arange(10.0)[:, None]
    parts = split_wqkv(packed, heads=6, groups=2)
    rows = {name: part.flatten().tolist() for name, part in parts.items()}
    assert rows == {"q": [0, 1, 2, 5, 6, 7], "k": [3, 8], "v": [4, 9]}


def test_every_key_of_the_release_has_its_place():
    tensors = {
        name.removeprefix("model."): value
        for name, value in load_file(FOLDER / "model.safetensors").items()
        if name.startswith("model.")
    }
    config = convert_config(read_object(FOLDER / "base" / "config.json"), "here", 5)
    native = convert_tensors(tensors, heads=4, groups=2)
    missing = set(InternVLModel(config).state_dict()) ^ set(native)
    assert missing == {"language_model.lm_head.weight"}
    assert sum(v.numel() for v in native.values()) == sum(v.numel() for v in tensors.values())


@pytest.mark.slow
def test_what_every_reward_promises():
    check_contract(tiny(), example_batch(3, frames=9), atol=5e-5, rtol_gradient=1, levels=0.5)


def test_a_prompt_with_a_special_token_fails_alone():
    batch = MediaBatch(torch.cat([film(0), film(1)]), ["a <IMG_CONTEXT>", VALUES["prompts"][1]])
    output = tiny().score(batch)
    assert output.reasons == {0: "its prompt contains the special token <IMG_CONTEXT>"}
    assert output.values[1, 5].item() == pytest.approx(RECORDED["overall1"].item(), abs=2e-5)


def test_a_checkpoint_that_does_not_fit_is_refused_by_key(tmp_path):
    copied = Path(shutil.copy(FOLDER / "model.safetensors", tmp_path))
    check_keys(copied, "model.mlp1.3.bias", tiny(tmp_path).load)
    shutil.copy(FOLDER / "model.safetensors", tmp_path)
    check_keys(copied, "reward_transform_matrix", tiny(tmp_path).load)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ps_version": "v1"}, "ps_version of .* is 'v1'; only 'v2' is supported"),
        ({"force_image_size": 448}, "force_image_size of .* is 448; only 56"),
        ({"model_type": "internvl"}, "model_type of .* is 'internvl'; only 'internvl_chat'"),
        ({"select_layer": -2}, "select_layer of .* is -2"),
    ],
)
def test_a_configuration_that_is_computed_otherwise_is_refused(tmp_path, change, message):
    shutil.copytree(FOLDER / "base", tmp_path / "base")
    file = tmp_path / "base" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        tiny(base=tmp_path / "base").load()


def test_another_tokenizer_is_refused_and_settings_enter_the_fingerprint(monkeypatch):
    other = [{"dtype": "bfloat16"}, {"base": FOLDER}, {"temperature": 2.0}, {"criteria": True}]
    check_fingerprints([tiny(), *(tiny(**settings) for settings in other)])
    monkeypatch.setattr(internvl2, "TURN", (92542, 92543, 525, 11353, 364))
    with pytest.raises(ValueError, match="encodes the end of a turn as"):
        tiny().load()
