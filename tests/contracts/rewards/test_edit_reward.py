"""EditReward against transformers' own Qwen2.5-VL and heads written out by hand."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText, Qwen2VLImageProcessorPil

from flowalign.types import MediaBatch
from reward_models.backbones.pixels import resize
from reward_models.backbones.qwen2_vl import count_tokens
from reward_models.backbones.reward_bases import to_uint8
from reward_models.preference import edit_reward
from reward_models.preference.edit_reward import EditReward, Instructions, fuse_heads
from tests.fixtures.reward_contract import (
    check_contract,
    check_fingerprints,
    check_keys,
    example_batch,
)
from tests.fixtures.tiny_qwen import build_judge

torch.set_num_threads(1)
SIDE = 56
TEXTS = ("\nDone {prompt}? <|Reward|>\nEND\n", "\nLook, {prompt}! <|Reward|>\nEND\n")
PROMPTS = ("make it red", "remove the dog", "a hat", "cut")


def heads(generator):
    """Weights of both heads under the published names, large enough to separate samples."""
    tensors = {}
    for head in range(2):
        for layer, (n, m) in ((0, (1024, 48)), (3, (16, 1024)), (5, (2, 16))):
            name = f"rm_heads.head_{head}.{layer}"
            tensors[f"{name}.weight"] = torch.randn(n, m, generator=generator) * 2 / math.sqrt(m)
            tensors[f"{name}.bias"] = torch.randn(n, generator=generator)
    return tensors


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base, and a checkpoint with a row more of embeddings in the names of transformers 4.57."""
    base, checkpoint = (tmp_path_factory.mktemp(name) for name in ("base", "checkpoint"))
    build_judge(base, "qwen2_5_vl")
    native = load_file(base / "model.safetensors")
    tensors = {_renamed(name): value for name, value in native.items()}
    generator = torch.Generator().manual_seed(5)
    table = tensors["model.language_model.embed_tokens.weight"]
    row = torch.randn(1, table.shape[1], generator=generator)
    tensors["model.language_model.embed_tokens.weight"] = torch.cat([table, row])
    tensors["lm_head.weight"] = torch.zeros(len(table) + 1, table.shape[1])
    save_file(tensors | heads(generator), checkpoint / "model.safetensors")
    return base, checkpoint


def _renamed(name):
    if name.startswith("visual."):
        return f"model.{name}"
    old = name.startswith("model.") and not name.startswith(("model.language", "model.visual"))
    return name.replace("model.", "model.language_model.", 1) if old else name


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(edit_reward, "PIXELS", SIDE * SIDE)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for name, text in zip(("following", "quality"), TEXTS, strict=True):
        (folder / f"{name}.txt").write_text(text)
    return {name: str(folder / f"{name}.txt") for name in ("following", "quality")}


def tiny(folders, texts, **settings):
    base, checkpoint = folders
    settings = {"dtype": "float32", "device": "cpu"} | settings
    settings["instructions"] = Instructions(**texts)
    return EditReward(str(settings.pop("checkpoint", checkpoint)), str(base), **settings)


def edits(num=3):
    batch = example_batch(num, height=56, width=56)
    sources = example_batch(num, height=70, width=90, seed=11).media
    return replace(batch, prompts=PROMPTS[:num], references=[[source[0]] for source in sources])


def native(folders):
    """The weights of the checkpoint, and transformers' own network with them."""
    tensors = load_file(folders[1] / "model.safetensors")
    network = AutoModelForImageTextToText.from_pretrained(folders[0]).eval().model
    network.language_model.embed_tokens.weight = torch.nn.Parameter(
        tensors["model.language_model.embed_tokens.weight"]
    )
    return tensors, network


def by_hand(tensors, network, reward, batch, i):
    """Both heads' (mu, log sigma) from the checkpoint's formulas: [2, 2]."""
    pictures = [
        Image.fromarray(to_uint8(image)[0])
        for image in (batch.references[i][0][None], batch.media[i])
    ]
    processor = Qwen2VLImageProcessorPil(min_pixels=SIDE * SIDE, max_pixels=SIDE * SIDE)
    seen = processor(pictures, return_tensors="pt")
    tokens = [count_tokens(tuple(grid)) for grid in seen["image_grid_thw"].tolist()]
    found = []
    for head, text in enumerate(TEXTS):
        media = "".join(f"<|vision_start|>{'<|image_pad|>' * num}<|vision_end|>" for num in tokens)
        ids = reward.tokenizer(
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
            f"{media}{text.replace('{prompt}', batch.prompts[i])}<|im_end|>\n"
            "<|im_start|>assistant\n",
            return_tensors="pt",
        )["input_ids"]
        with torch.no_grad():
            images = network.visual(seen["pixel_values"], grid_thw=seen["image_grid_thw"])
            embedded = network.language_model.embed_tokens(ids)
            place = (ids == reward.tokenizer.convert_tokens_to_ids("<|image_pad|>"))[..., None]
            embedded = embedded.masked_scatter(place.expand_as(embedded), images.pooler_output)
            hidden = network.language_model(
                inputs_embeds=embedded,
                position_ids=torch.arange(ids.shape[1]).expand(3, 1, -1),
                use_cache=False,
            ).last_hidden_state[0]
        x = hidden[ids[0].tolist().index(reward.tokenizer.convert_tokens_to_ids("<|Reward|>"))]
        for layer in (0, 3, 5):
            weight, bias = (
                tensors[f"rm_heads.head_{head}.{layer}.{part}"] for part in ("weight", "bias")
            )
            x = F.linear(x.relu() if layer else x, weight, bias)
        found.append(x)
    return torch.stack(found)


def test_scores_and_deviations_are_those_of_the_formulas(folders, texts, small):
    reward, batch = tiny(folders, texts), edits()
    output = reward.score(batch)
    tensors, network = native(folders)
    for i in range(3):
        mu, log_sigma = by_hand(tensors, network, reward, batch, i).T
        expected = torch.cat([mu, mu.mean()[None]])
        torch.testing.assert_close(output.values[i], expected, atol=2e-4, rtol=1e-4)
        expected = torch.cat([log_sigma, log_sigma.mean()[None]])
        torch.testing.assert_close(output.uncertainty[i].log(), expected, atol=2e-4, rtol=1e-4)
    assert len(output.values.unique()) == 9


def test_heads_are_fused_by_mean_minimum_or_sum():
    """By hand: mu 1 and 3; sigma 3 and 4, with variances that sum to 25."""
    heads = torch.tensor([[[1.0, math.log(3.0)], [3.0, math.log(4.0)]]])
    assert fuse_heads(heads, "mean")[0].tolist() == pytest.approx([2.0, math.log(12.0) / 2])
    assert fuse_heads(heads, "min")[0].tolist() == pytest.approx([1.0, math.log(3.0)])
    assert fuse_heads(heads, "sum")[0].tolist() == pytest.approx([4.0, math.log(5.0)])


@pytest.mark.slow
def test_what_every_reward_promises(folders, texts, small, monkeypatch):
    """Without rounding to 8 bits: so small a network is far from linear within a level."""
    monkeypatch.setattr(edit_reward, "resize", lambda x, h, w, quantised: resize(x, h, w))
    check_contract(tiny(folders, texts), edits(), atol=2e-4, rtol_gradient=0.1, levels=0.005)


def test_a_sample_that_cannot_be_asked_about_fails_alone(folders, texts, small):
    batch = edits(4)
    references = [*batch.references[:1], [], *batch.references[2:]]
    prompts = [*batch.prompts[:2], "a <|Reward|>", batch.prompts[3]]
    output = tiny(folders, texts).score(replace(batch, references=references, prompts=prompts))
    assert output.valid.all(1).tolist() == [True, False, False, True]
    assert output.reasons == {
        1: "its source image is missing",
        2: "its prompt contains the special token <|Reward|>",
    }


def test_the_older_names_and_a_torch_file_are_the_same_checkpoint(folders, texts, small, tmp_path):
    tensors = load_file(folders[1] / "model.safetensors")
    older = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): value
        for name, value in tensors.items()
    }
    torch.save({"model": older}, tmp_path / "model.pth")
    again = tiny(folders, texts, checkpoint=tmp_path)
    expected = tiny(folders, texts).score(edits(1)).values
    assert torch.equal(again.score(edits(1)).values, expected)


def test_a_checkpoint_that_does_not_fit_is_refused_by_key(folders, texts, tmp_path):
    copied = Path(shutil.copy(folders[1] / "model.safetensors", tmp_path))
    load = tiny(folders, texts, checkpoint=tmp_path).load
    check_keys(copied, "rm_heads.head_1.5.bias", load)


def test_settings_that_cannot_be_are_refused_before_weights_are_read(folders, texts, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text("Rate {prompt}.")
    for settings, message in (
        ({"following": str(empty)}, "empty.txt must hold <.Reward.> once"),
        ({"quality": "nowhere.txt"}, "'nowhere.txt' does not exist"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny(folders, texts | settings)
    other = tiny((build_judge(tmp_path / "other", "qwen2_vl"), folders[1]), texts)
    with pytest.raises(ValueError, match="is of type 'qwen2_vl', not qwen2_5_vl"):
        other.load()


def test_fingerprints_tell_texts_and_settings_apart(folders, texts):
    swapped = {"following": texts["quality"], "quality": texts["following"]}
    check_fingerprints(
        [
            tiny(folders, texts),
            tiny(folders, swapped),
            tiny(folders, texts, fusion="min"),
            tiny(folders, texts | {"system": "You are MiMo."}),
            tiny(folders, texts, dtype="bfloat16"),
        ]
    )


def test_the_bundled_instructions_can_be_used():
    reward = EditReward("nowhere")
    assert all("Editing instruction - {prompt}" in text for text in reward.asked)
    batch = MediaBatch(torch.rand(1, 1, 3, 8, 8), ["a"])
    with pytest.raises(ValueError, match="references"):
        reward.score(batch)
