"""Qwen2-VL's inputs, against transformers' own processors, and its loading."""

import shutil

import pytest
import torch
from transformers import Qwen2VLVideoProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from reward_models import HPSv3
from reward_models.backbones.qwen2_vl import (
    build_chat,
    check_chat,
    count_tokens,
    cut_patches,
    fit_size,
    read_base,
)
from reward_models.backbones.reward_bases import Unscorable
from tests.fixtures.golden import GOLDEN

torch.set_num_threads(1)
BASE = str(GOLDEN / "H_videoreward" / "base")


def levels(*shape):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def test_patches_of_a_video_are_those_of_the_official_processor():
    frames = levels(4, 3, 84, 112)
    official = Qwen2VLVideoProcessor(do_resize=False, do_sample_frames=False)
    expected = official([frames], return_tensors="pt")
    patches, grid = cut_patches(frames.float() / 255)
    assert [list(grid)] == expected["video_grid_thw"].tolist()
    torch.testing.assert_close(patches, expected["pixel_values_videos"], atol=1e-6, rtol=0)


def test_patches_of_a_picture_are_those_of_the_official_processor():
    picture = levels(56, 140, 3)
    official = Qwen2VLImageProcessorPil(do_resize=False)
    expected = official([picture.numpy()], return_tensors="pt", input_data_format="channels_last")
    patches, grid = cut_patches(picture.permute(2, 0, 1)[None].float() / 255)
    assert [list(grid)] == expected["image_grid_thw"].tolist()
    torch.testing.assert_close(patches, expected["pixel_values"], atol=1e-6, rtol=0)
    assert count_tokens(grid) == 10


def test_sizes_are_those_of_the_official_processor():
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(29, 2000, (500, 2), generator=generator).tolist()
    for height, width in [*sizes, (480, 832), (720, 1280), (60, 90), (29, 5000)]:
        for fewest, most in ((100352, 200704), (200704, 200704), (3136, 1003520)):
            expected = smart_resize(height, width, 28, fewest, most)
            assert fit_size(height, width, fewest, most) == tuple(expected)


def test_sizes_by_hand():
    assert fit_size(480, 832, 100352, 200704) == (336, 588)
    assert fit_size(60, 90, 200704, 200704) == (392, 560)
    with pytest.raises(ValueError, match="over 200 times"):
        fit_size(10, 2001, 3136, 1003520)


def test_a_chat_has_one_vision_token_per_place_and_the_text_once():
    _, tokenizer = read_base(BASE, ["<|X|>"])
    ids = build_chat(tokenizer, "rate <|X|>.", "video", (torch.zeros(28, 3), (1, 2, 14))).ids
    assert ids.count(tokenizer.convert_tokens_to_ids("<|video_pad|>")) == 7
    assert ids.count(tokenizer.convert_tokens_to_ids("<|X|>")) == 1
    assert tokenizer.decode(ids).endswith("rate <|X|>.<|im_end|>\n<|im_start|>assistant\n")


def test_a_prompt_with_special_tokens_cannot_be_scored():
    _, tokenizer = read_base(BASE, ["<|X|>"])
    check_chat(tokenizer, "{prompt} {0} \\1", torch.zeros(1, 3, 10, 2000))
    for token in ("<|X|>", "<|video_pad|>", "<|im_end|>"):
        with pytest.raises(Unscorable, match="special token"):
            check_chat(tokenizer, f"a cat {token}")
    with pytest.raises(Unscorable, match="over 200 times"):
        check_chat(tokenizer, "a cat", torch.zeros(1, 3, 10, 2001))


def test_new_tokens_enlarge_the_vocabulary_by_their_number():
    config, tokenizer = read_base(BASE, ["<|X|>", "<|Y|>"])
    assert config.text_config.vocab_size == len(tokenizer) == 266


def test_a_base_of_another_kind_or_without_a_tokenizer_is_refused(tmp_path):
    shutil.copytree(BASE, tmp_path / "base")
    config = tmp_path / "base" / "config.json"
    config.write_text(config.read_text().replace('"qwen2_vl"', '"qwen2_5_vl"'))
    with pytest.raises(ValueError, match=r"type 'qwen2_5_vl', not qwen2_vl"):
        read_base(str(tmp_path / "base"), [])
    (tmp_path / "base" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"nor a folder with tokenizer\.json"):
        read_base(str(tmp_path / "base"), [])


def test_wrong_options_are_refused_by_name():
    with pytest.raises(ValueError, match="'mRoPE'; it must be one of sequential, mrope"):
        HPSv3(position_mode="mRoPE")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="'half'; it must be one of float32, bfloat16"):
        HPSv3(dtype="half")  # pyright: ignore[reportArgumentType]
