"""CLIPScore, PickScore, HPSv2 and the aesthetic head: original numbers from original files."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torchvision.transforms import functional as TF
from transformers import SiglipConfig, SiglipModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from assets.shapes.world import render
from flowalign.types import MediaBatch
from reward_models.backbones.checkpoints import on_meta_device, read_tensors
from reward_models.backbones.clip_towers import Preprocessing, read_open_clip
from reward_models.backbones.pixels import crop_shortest_side, resize, resize_like_pil
from reward_models.preference.clip_rewards import (
    Aesthetic,
    CLIPScore,
    HPSv2,
    PickScore,
    build_linear_stack,
)
from reward_models.preference.image_reward import ImageReward
from tests.fixtures.golden import GOLDEN, recorded_picture
from tests.fixtures.reward_contract import check_contract, check_fingerprints, example_batch

PICK, HPS, HEAD = (str(GOLDEN / f"H_{name}") for name in ("pickscore", "hpsv2", "aesthetic"))
BLIP = str(GOLDEN / "H_imagereward")
SIZES, WEIGHTS = f"{HPS}/open_clip_config.json", f"{HPS}/HPS_v2.1_compressed.pt"
HEAD_FILE = "sac+logos+ava1-l14-linearMSE.pth"
PICK_IO, HPS_IO, HEAD_IO = (
    load_file(GOLDEN / f"H_{name}_io.safetensors") for name in ("pickscore", "hpsv2", "aesthetic")
)


def prompts(name):
    return json.loads((GOLDEN / f"H_{name}_io.json").read_text())["values"]["prompts"]


def build(kind):
    model = {
        "clip_score open_clip": lambda: CLIPScore(SIZES, WEIGHTS, device="cpu"),
        "clip_score hugging face": lambda: CLIPScore(PICK, None, device="cpu"),
        "pickscore": lambda: PickScore(PICK, PICK, device="cpu"),
        "hpsv2": lambda: HPSv2(weights=HPS, model=SIZES, device="cpu"),
        "aesthetic": lambda: Aesthetic(HEAD, HEAD_FILE, SIZES, WEIGHTS, device="cpu"),
        "image_reward": lambda: ImageReward(BLIP, BLIP, device="cpu"),
    }[kind]()
    model.load()
    return model


KINDS = ("clip_score open_clip", "clip_score hugging face", "pickscore", "hpsv2", "aesthetic")
KINDS += ("image_reward",)


@pytest.fixture(scope="module")
def pickscore():
    return build("pickscore")


@pytest.fixture(scope="module")
def hpsv2():
    return build("hpsv2")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_contract_of_rewards_holds(kind):
    # Rounding errors grow with PickScore's factor of 100.
    check_contract(
        build(kind), example_batch(), 1e-4 if kind == "pickscore" else 1e-5, 0.1, levels=0.5
    )


@pytest.mark.parametrize("i", range(4))
def test_pickscore_is_that_of_the_original_code(pickscore, i):
    batch = MediaBatch(recorded_picture(PICK_IO, i), [prompts("pickscore")[i]])
    raw, divided = (float(PICK_IO[name][i]) for name in ("scores_raw", "scores_div26"))
    assert pickscore.score(batch).values[0, 0] == pytest.approx(raw, rel=2e-5)
    model = PickScore(PICK, PICK, "divided by 26", device="cpu")
    assert model.spec.normalisation == "divided by 26"
    assert model.score(batch).values[0, 0] == pytest.approx(divided, rel=2e-5)


def test_pickscore_sees_the_pixels_of_the_original_to_the_bit(pickscore):
    for i in range(4):
        pixels = pickscore.network.preprocessing(recorded_picture(PICK_IO, i)[0])
        torch.testing.assert_close(pixels[0], PICK_IO["pixel_values"][i], rtol=0, atol=1e-6)


def test_embeddings_are_those_of_the_original_processor(pickscore):
    texts = pickscore.network.encode_prompts(prompts("pickscore"))
    torch.testing.assert_close(texts, PICK_IO["text_embeds"], rtol=2e-5, atol=2e-6)


def test_clip_score_is_pickscore_without_its_factor(pickscore):
    batch = example_batch()
    cosine = build("clip_score hugging face").score(batch).values
    factor = pickscore.network.scale
    torch.testing.assert_close(pickscore.score(batch).values, cosine * factor)


@pytest.mark.parametrize("i", range(4))
@pytest.mark.parametrize("p", range(2))
def test_hpsv2_is_that_of_the_original_code(hpsv2, p, i):
    score = hpsv2.score(MediaBatch(recorded_picture(HPS_IO, i), [prompts("hpsv2")[p]])).values[0, 0]
    assert score == pytest.approx(float(HPS_IO["scores"][p, i]), abs=1e-5)


def test_hpsv2_pads_the_longest_side_with_black_before_it_normalises(hpsv2):
    for i in range(4):
        pixels = hpsv2.network.preprocessing(recorded_picture(HPS_IO, i)[0])[0]
        torch.testing.assert_close(pixels[:, ::3, ::3], HPS_IO[f"pre{i}_every3"], rtol=0, atol=1e-4)
        rows = pixels.double().sum(2)
        torch.testing.assert_close(rows, HPS_IO[f"pre{i}_rowsum"], rtol=1e-5, atol=1e-3)


def test_clip_score_on_the_same_weights_crops_instead(hpsv2):
    batch = MediaBatch(recorded_picture(HPS_IO, 0), [prompts("hpsv2")[0]])
    cropped, padded = build("clip_score open_clip").score(batch), hpsv2.score(batch)
    assert (cropped.values - padded.values).abs() > 1e-3


def test_a_folder_of_open_clip_scores_with_its_own_tokenizer():
    reward = CLIPScore(model="assets/shapes/clip", pretrained=None, device="cpu")
    prompts = Path("assets/shapes/prompts/seen.txt").read_text().splitlines()[:2]
    image = render(prompts[0], torch.Generator().manual_seed(0))
    batch = MediaBatch(image.expand(2, 1, -1, -1, -1), prompts, [{}, {}])
    reward.load()
    right, wrong = reward.score(batch).values[:, 0].tolist()
    assert right > wrong + 0.1
    assert reward.embed(batch).shape == (2, 64)


def test_the_aesthetic_head_is_that_of_the_original_code():
    head = build_linear_stack(read_tensors(Path(HEAD) / HEAD_FILE), HEAD)
    normalised = torch.nn.functional.normalize(HEAD_IO["embeds"], dim=-1)
    torch.testing.assert_close(head(normalised)[:, 0], HEAD_IO["scores"], rtol=1e-5, atol=1e-6)


def test_aesthetic_is_the_head_on_the_normalised_embedding_whatever_the_prompt():
    model, batch = build("aesthetic"), example_batch(num_samples=2)
    towers = read_open_clip(SIZES, WEIGHTS)
    pixels = Preprocessing(224)(batch.media[:, 0])
    embedded = towers.model.encode_image(pixels)
    head = build_linear_stack(read_tensors(Path(HEAD) / HEAD_FILE), HEAD)
    expected = head(embedded / embedded.norm(dim=-1, keepdim=True))
    torch.testing.assert_close(model.score(batch).values, expected)
    torch.testing.assert_close(model.score(replace(batch, prompts=["", "x"])).values, expected)


def test_the_aesthetic_head_sits_on_siglip_too(tmp_path):
    tower = {
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = SiglipConfig(
        vision_config={**tower, "image_size": 32, "patch_size": 8},
        text_config={**tower, "vocab_size": 514, "projection_size": 24},
    )
    torch.manual_seed(0)
    siglip = SiglipModel(config).eval()
    siglip.save_pretrained(tmp_path)
    for name in ("merges.txt", "vocab.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(Path(PICK) / name, tmp_path)
    described = {
        "size": {"height": 32, "width": 32},
        "resample": 3,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(described))
    batch = example_batch(num_samples=2)
    model = Aesthetic(HEAD, HEAD_FILE, str(tmp_path), device="cpu")
    pixels = resize_like_pil(batch.media[:, 0], 32, 32) * 2 - 1
    embedded = siglip.vision_model(pixels).pooler_output
    head = build_linear_stack(read_tensors(Path(HEAD) / HEAD_FILE), HEAD)
    expected = head(embedded / embedded.norm(dim=-1, keepdim=True)).detach()
    torch.testing.assert_close(model.score(batch).values, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_video_scores_the_mean_of_its_frames(kind):
    model, batch = build(kind), example_batch(num_samples=2, frames=3)
    frames = [
        model.score(MediaBatch(batch.media[:, k : k + 1], batch.prompts)).values for k in range(3)
    ]
    torch.testing.assert_close(model.score(batch).values, torch.stack(frames).mean(0))


def test_each_distinct_prompt_is_encoded_once_and_reaches_its_own_rows(pickscore, monkeypatch):
    seen, encode = [], pickscore.network.encode_prompts
    monkeypatch.setattr(
        pickscore.network, "encode_prompts", lambda given: seen.extend(given) or encode(given)
    )
    batch = replace(example_batch(), prompts=["b", "a", "b", "c"])
    together = pickscore.score(batch).values
    assert seen == ["b", "a", "c"]
    alone = [pickscore.score(batch.take([i])).values for i in range(4)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("sizes", [(40, 100, 32, 80), (333, 90, 118, 32), (64, 48, 90, 40)])
def test_quantised_resize_is_pil_to_the_bit(sizes):
    height, width, to_height, to_width = sizes
    bits = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    expected = Image.fromarray(bits)
    # One axis at a time, as PIL's versions differ in which comes first.
    rows_first = height - to_height > max(0, 2 * (width - to_width))
    for axis in (1, 0) if rows_first else (0, 1):
        size = (to_width, expected.height) if axis == 0 else (expected.width, to_height)
        expected = expected.resize(size, Image.Resampling.BICUBIC)
    frames = torch.from_numpy(bits).permute(2, 0, 1)[None] / 255
    result = (resize_like_pil(frames, to_height, to_width) * 255).round()[0].permute(1, 2, 0)
    assert np.array_equal(result.numpy(), np.asarray(expected, dtype=np.float32))


def test_the_smooth_resize_is_within_a_level_and_a_half_of_pil_on_smooth_pictures():
    frames = (example_batch(height=120, width=90).media[:, 0] * 255).round() / 255
    apart = (resize(frames, 40, 30) - resize_like_pil(frames, 40, 30)).abs() * 255
    assert 0 < apart.max() < 1.5


def test_a_tensor_scores_what_its_8_bit_picture_scores(pickscore):
    batch = example_batch(height=32, width=32)
    saved = replace(batch, media=(batch.media * 255).round() / 255)
    torch.testing.assert_close(pickscore.score(saved).values, pickscore.score(batch).values)


@pytest.mark.parametrize("shape", [(40, 57), (61, 40), (40, 43), (32, 35), (45, 32)])
def test_odd_margins_are_cropped_as_the_library_of_each_model_does(pickscore, shape):
    bits = np.random.default_rng(1).integers(0, 256, (*shape, 3), dtype=np.uint8)
    frames = torch.from_numpy(bits).permute(2, 0, 1)[None] / 255
    processor = CLIPImageProcessorPil.from_pretrained(PICK)
    expected = processor(Image.fromarray(bits), return_tensors="pt")["pixel_values"]
    result = pickscore.network.preprocessing(frames)
    torch.testing.assert_close(result, expected, rtol=0, atol=2e-6)
    small = TF.resize(Image.fromarray(bits), [32], TF.InterpolationMode.BICUBIC)
    cropped = np.asarray(TF.center_crop(small, [32, 32]))
    result = (crop_shortest_side(frames, 32, quantised=True) * 255).round()[0].permute(1, 2, 0)
    assert np.array_equal(result.numpy(), cropped)


def rename(tensors, key):
    tensors[f"{key}_"] = tensors.pop(key)


BREAKS = {
    "renamed": rename,
    "dropped": lambda tensors, key: tensors.pop(key),
    "not a number": lambda tensors, key: tensors[key].view(-1)[0].fill_(torch.nan),
    "another shape": lambda tensors, key: tensors.update({key: torch.zeros(2, 7)}),
}


@pytest.mark.parametrize("how", BREAKS)
def test_checkpoints_that_do_not_account_for_every_key_are_refused(tmp_path, how):
    folder = Path(shutil.copytree(PICK, tmp_path / "pick"))
    tensors = load_file(folder / "model.safetensors")
    BREAKS[how](tensors, "visual_projection.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"(?s)pick does not fit.*visual_projection\.weight"):
        PickScore(str(folder), PICK).load()
    content = torch.load(WEIGHTS, weights_only=True)
    BREAKS[how](content["state_dict"], "visual.proj")
    torch.save(content, tmp_path / "hps.pt")
    for make in (
        HPSv2(weights=str(tmp_path / "hps.pt"), model=SIZES),
        CLIPScore(SIZES, str(tmp_path / "hps.pt")),
    ):
        with pytest.raises(ValueError, match=r"(?s)hps\.pt does not fit.*visual\.proj"):
            make.load()
    tensors = torch.load(Path(HEAD) / HEAD_FILE, weights_only=True)
    BREAKS[how](tensors, "layers.0.weight")
    torch.save(tensors, tmp_path / "head.pth")
    with pytest.raises(ValueError, match=r"(?s)head\.pth does not fit.*layers\.0\.weight"):
        Aesthetic(str(tmp_path), "head.pth", SIZES, WEIGHTS).load()


def test_embedded_images_are_compared_with_texts_by_the_score(pickscore):
    """A clip has the mean embedding of its frames, so its score is the product with the text."""
    batch = MediaBatch(torch.rand(2, 3, 3, 40, 50), ["a cat", "two dogs"], fps=(8.0, 8.0))
    cosine = (pickscore.embed(batch) * pickscore.network.texts(batch.prompts)).sum(1)
    torch.testing.assert_close(
        pickscore.network.scale * cosine, pickscore.score(batch).values[:, 0], rtol=1e-5, atol=1e-4
    )


def test_old_position_numbers_may_be_there(tmp_path):
    folder = Path(shutil.copytree(PICK, tmp_path / "pick"))
    tensors = load_file(folder / "model.safetensors")
    tensors["text_model.embeddings.position_ids"] = torch.arange(77)[None]
    save_file(tensors, folder / "model.safetensors")
    batch = MediaBatch(torch.rand(2, 1, 3, 40, 50), ["a cat", "two dogs"])
    old = PickScore(str(folder), PICK, device="cpu").score(batch)
    assert torch.equal(old.values, PickScore(PICK, PICK, device="cpu").score(batch).values)


def test_a_half_precision_checkpoint_is_scored_in_float32(tmp_path, hpsv2):
    content = torch.load(WEIGHTS, weights_only=True)
    content["state_dict"] = {key: value.half() for key, value in content["state_dict"].items()}
    torch.save(content, tmp_path / "HPS_v2_compressed.pt")
    model = HPSv2("v2", str(tmp_path), SIZES, device="cpu")
    assert model.spec.dims == ("hpsv2",)
    batch = example_batch(num_samples=2)
    torch.testing.assert_close(
        model.score(batch).values, hpsv2.score(batch).values, atol=2e-3, rtol=0
    )
    assert next(model.network.parameters()).dtype == torch.float32


@pytest.mark.parametrize("architecture", ["ViT-H-14", "ViT-L-14"])
def test_the_real_sizes_have_the_key_names_of_the_tiny_checkpoint(architecture):
    import open_clip

    with on_meta_device():
        real = open_clip.CLIP(**open_clip.get_model_config(architecture)).state_dict()
    tiny = read_tensors(Path(WEIGHTS))
    names = [{re.sub(r"blocks\.\d+\.", "blocks.N.", key) for key in keys} for keys in (real, tiny)]
    assert names[0] == names[1]


def test_published_weights_get_the_activation_they_were_trained_with(monkeypatch):
    asked = []

    def create_model(model, tag, force_quick_gelu):
        asked.append((model, tag, force_quick_gelu))
        raise RuntimeError("no network here")

    monkeypatch.setattr("open_clip.create_model", create_model)
    for tag in ("openai", "laion2b_s32b_b82k"):
        with pytest.raises(ValueError, match="no network here"):
            CLIPScore("ViT-L-14", tag).load()
    assert asked == [("ViT-L-14", "openai", True), ("ViT-L-14", "laion2b_s32b_b82k", False)]


def test_unknown_architectures_and_tags_are_refused_by_name():
    with pytest.raises(ValueError, match="'ViT-Z' is neither an architecture"):
        CLIPScore("ViT-Z", WEIGHTS).load()
    with pytest.raises(ValueError, match="neither-file-nor-tag"):
        CLIPScore("ViT-L-14", "neither-file-nor-tag").load()


def test_folders_of_another_kind_are_refused_by_name(tmp_path):
    folder = Path(shutil.copytree(PICK, tmp_path / "pick"))
    config = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps({**config, "resample": 2}))
    with pytest.raises(ValueError, match="only a bicubic resize"):
        CLIPScore(str(folder), None).load()
    (folder / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match="'bert'; there are clip, siglip"):
        CLIPScore(str(folder), None).load()


def test_settings_and_weights_decide_the_fingerprint(tmp_path):
    other = Path(shutil.copytree(PICK, tmp_path / "pick"))
    tensors = load_file(other / "model.safetensors")
    tensors["visual_projection.weight"][0] += 1
    save_file(tensors, other / "model.safetensors")
    check_fingerprints(
        [
            PickScore(PICK, PICK),
            PickScore(PICK, PICK, "divided by 26"),
            PickScore(str(other), PICK),
            PickScore(),
            HPSv2(),
            HPSv2("v2"),
            HPSv2(weights=HPS, model=SIZES),
            CLIPScore(),
            CLIPScore(PICK, None),
            CLIPScore("ViT-L-14", "laion2b_s32b_b82k"),
            Aesthetic(),
            Aesthetic(HEAD, HEAD_FILE, SIZES, WEIGHTS),
        ]
    )
