"""ImageReward: the original's numbers from the original's file, with every key accounted for."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flowalign.types import MediaBatch
from reward_models.backbones.checkpoints import on_meta_device, rename_tensors
from reward_models.preference.image_reward import RENAMES, SIZES, ImageReward, ImageRewardNetwork
from tests.fixtures.golden import GOLDEN, recorded_picture
from tests.fixtures.reward_contract import check_fingerprints, check_keys

FOLDER = GOLDEN / "H_imagereward"
RECORDED = load_file(GOLDEN / "H_imagereward_io.safetensors")
PROMPTS = json.loads((GOLDEN / "H_imagereward_io.json").read_text())["values"]["prompts"]


@pytest.fixture(scope="module")
def model():
    model = ImageReward(str(FOLDER), str(FOLDER), device="cpu")
    model.load()
    return model


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(FOLDER, tmp_path / "checkpoint"))


def rewritten(folder, change):
    path = folder / "ImageReward.pt"
    tensors = torch.load(path, weights_only=True)
    change(tensors)
    torch.save(tensors, path)
    return ImageReward(str(folder), str(folder), device="cpu")


@pytest.mark.parametrize("i", range(4))
@pytest.mark.parametrize("p", range(2))
def test_scores_are_those_of_the_original_code(model, p, i):
    score = model.score(MediaBatch(recorded_picture(RECORDED, i), [PROMPTS[p]])).values[0, 0]
    assert float(score) == pytest.approx(float(RECORDED["scores"][p, i]), abs=2e-5)


def test_the_differentiable_path_gives_the_recorded_scores_too(model):
    for i in range(4):
        media = recorded_picture(RECORDED, i).requires_grad_()
        score = model.score(MediaBatch(media, [PROMPTS[0]])).values[0, 0]
        assert score.requires_grad
        assert score.item() == pytest.approx(float(RECORDED["score_gard"][i]), abs=2e-5)


def test_a_long_prompt_is_cut_where_the_original_cuts_it(model):
    score = model.score(MediaBatch(recorded_picture(RECORDED, 0), ["the cat " * 40])).values[0, 0]
    assert float(score) == pytest.approx(float(RECORDED["long_prompt_score"]), abs=2e-5)


def test_a_checkpoint_that_does_not_account_for_every_key_is_refused(folder):
    load = ImageReward(str(folder), str(folder), device="cpu").load
    check_keys(folder / "ImageReward.pt", "blip.visual_encoder.norm.bias", load)
    with pytest.raises(ValueError, match=r"no word embeddings(.|\n)*|ImageReward\.pt"):
        rewritten(
            folder, lambda t: t.pop("blip.text_encoder.embeddings.word_embeddings.weight")
        ).load()


def test_contrastive_projections_and_positions_may_be_there_or_not(folder, model):
    def drop(tensors):
        for key in [k for k in tensors if "_proj." in k and "encoder" not in k]:
            del tensors[key]
        del tensors["blip.text_encoder.embeddings.position_ids"]

    batch = MediaBatch(recorded_picture(RECORDED, 0), [PROMPTS[1]])
    assert torch.equal(rewritten(folder, drop).score(batch).values, model.score(batch).values)


def test_the_default_sizes_are_blip_large_under_the_same_key_names():
    med = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 512,
        "layer_norm_eps": 1e-12,
    }
    with on_meta_device():
        large = ImageRewardNetwork(SIZES, med, 30524).state_dict()
    tiny = rename_tensors(torch.load(FOLDER / "ImageReward.pt", weights_only=True), RENAMES)
    unnumbered = [
        {re.sub(r"\b(layers?)\.\d+\.(?!weight|bias)", r"\1.N.", k) for k in names}
        for names in (large, tiny)
    ]
    unused = {"text.embeddings.position_ids"} | {
        f"blip.{tower}_proj.{kind}" for tower in ("vision", "text") for kind in ("weight", "bias")
    }
    assert unnumbered[1] - unnumbered[0] == unused
    assert unnumbered[0] <= unnumbered[1]
    assert large["vision.embeddings.position_embedding"].shape == (1, 197, 1024)
    assert large["vision.encoder.layers.23.mlp.fc1.weight"].shape == (4096, 1024)
    assert large["text.encoder.layer.11.crossattention.self.key.weight"].shape == (768, 1024)
    assert large["head.layers.0.weight"].shape == (1024, 768)


def test_weights_decide_the_fingerprint(folder):
    other = rewritten(folder, lambda t: t["mlp.layers.7.bias"].add_(1))
    check_fingerprints([ImageReward(str(FOLDER), str(FOLDER)), other, ImageReward()])
