"""HPSv3 against its original code, and what every reward promises."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flowalign.types import MediaBatch
from reward_models.backbones.pixels import resize
from reward_models.preference import hpsv3
from reward_models.preference.hpsv3 import HPSv3
from tests.fixtures.golden import GOLDEN, check_chats, load, recorded_picture
from tests.fixtures.reward_contract import (
    check_contract,
    check_fingerprints,
    check_keys,
    check_small_steps,
    example_batch,
)

torch.set_num_threads(1)
FOLDER = GOLDEN / "H_hpsv3"
RECORDED = load("H_hpsv3_io")
PROMPTS = json.loads((GOLDEN / "H_hpsv3_io.json").read_text())["values"]["prompts"]


def tiny(checkpoint=FOLDER, **kwargs):
    kwargs = {"dtype": "float32", "device": "cpu"} | kwargs
    return HPSv3(str(checkpoint), str(FOLDER / "base"), **kwargs)


@pytest.fixture(scope="module")
def model():
    model = tiny()
    model.load()
    return model


def recorded(i, prompt=None):
    return MediaBatch(recorded_picture(RECORDED, i), [prompt or PROMPTS[i]])


def outputs(model, i):
    output = model.score(recorded(i))
    assert output.uncertainty is not None
    return torch.cat([output.values[0], output.uncertainty[0].log()])


@pytest.mark.parametrize("i", range(3))
def test_mean_and_uncertainty_are_those_of_the_original(model, i):
    torch.testing.assert_close(outputs(model, i), RECORDED["logits"][i], atol=2e-5, rtol=0)


def test_tokens_and_pixels_are_those_of_the_original(model):
    chats = [model._chat(recorded(i), 0) for i in range(3)]
    check_chats(chats, RECORDED, "image_grid_thw")


def test_positions_of_three_axes_give_other_scores():
    wrong = tiny(position_mode="mrope")
    got = outputs(wrong, 2)
    torch.testing.assert_close(got, RECORDED["logits_mrope"][2], atol=2e-5, rtol=0)
    assert (got - RECORDED["logits"][2]).abs().max() > 0.3


def test_what_every_reward_promises(monkeypatch):
    monkeypatch.setattr(hpsv3, "INSTRUCTION", "\nRate {prompt}: <|Reward|>\n")
    monkeypatch.setattr(hpsv3, "PIXELS", 4 * 28 * 28)
    model, batch = tiny(), example_batch(3)
    check_contract(model, batch, rtol_gradient=1)  # the sign; the size is checked without rounding
    monkeypatch.setattr(hpsv3, "resize", lambda x, h, w, quantised: resize(x, h, w))
    check_small_steps(model, batch)


def test_a_failed_row_does_not_move_the_uncertainties_of_the_others(model, monkeypatch):
    monkeypatch.setattr(model, "batch_size", 1)
    picture = recorded(0).media
    batch = MediaBatch(
        torch.cat([picture] * 4), ["<|image_pad|>", PROMPTS[0], "a <|Reward|>", "a lion"]
    )
    output = model.score(batch)
    assert output.valid[:, 0].tolist() == [False, True, False, True]
    assert output.reasons == {
        0: "its prompt contains the special token <|image_pad|>",
        2: "its prompt contains the special token <|Reward|>",
    }
    assert output.uncertainty.isnan()[:, 0].tolist() == [True, False, True, False]
    expected = RECORDED["logits"][0]
    assert output.values[1, 0].item() == pytest.approx(expected[0].item(), abs=2e-5)
    assert output.uncertainty[1, 0].log().item() == pytest.approx(expected[1].item(), abs=2e-5)
    assert output.uncertainty[3] != output.uncertainty[1]


def test_a_ribbon_is_a_failure_with_a_reason(model):
    output = model.score(MediaBatch(torch.rand(2, 1, 3, 1, 201), ["a", "b"]))
    assert not output.valid.any()
    assert "over 200 times" in output.reasons[1]


def test_half_precision_keeps_positions_and_head_exact(model):
    half = tiny(dtype="bfloat16")
    half.load()
    dtypes = {name: value.dtype for name, value in half.network.named_parameters()}
    assert {v for k, v in dtypes.items() if k.startswith("backbone")} == {torch.bfloat16}
    assert {v for k, v in dtypes.items() if k.startswith("head")} == {torch.float32}
    assert {b.dtype for b in half.network.buffers()} == {torch.float32}
    assert outputs(half, 0)[0].item() == pytest.approx(outputs(model, 0)[0].item(), abs=0.05)


def rewritten(tmp_path, change):
    tensors = load_file(FOLDER / "HPSv3.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "HPSv3.safetensors")
    return tiny(tmp_path)


def test_a_checkpoint_that_does_not_fit_is_refused_by_key(tmp_path):
    copied = Path(shutil.copy(FOLDER / "HPSv3.safetensors", tmp_path))
    check_keys(copied, "rm_head.3.bias", tiny(tmp_path).load)


def test_a_single_file_and_a_folder_are_both_checkpoints(model, tmp_path):
    shutil.copy(FOLDER / "HPSv3.safetensors", tmp_path / "mine.safetensors")
    assert torch.equal(outputs(tiny(tmp_path / "mine.safetensors"), 1), outputs(model, 1))


def test_a_hub_name_without_a_hub_is_refused(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"^Qwen/Qwen2-VL-7B-Instruct is not a local folder"):
        HPSv3().load()
    with pytest.raises(ValueError, match="MizzenAI/HPSv3 is not a local folder"):
        HPSv3(base=str(FOLDER / "base")).load()


def test_fingerprints_tell_weights_and_settings_apart(tmp_path):
    def smaller(tensors):
        tensors["rm_head.5.bias"] -= 1

    other = rewritten(tmp_path, smaller)
    check_fingerprints([tiny(), other, tiny(position_mode="mrope"), tiny(dtype="bfloat16")])
    assert tiny().spec.fingerprint() == tiny(batch_size=1, offload=True).spec.fingerprint()
    assert math.isinf(tiny().spec.scale[1])
