"""D2-Align: a text embedding that a learned direction moves, by hand and on recorded towers."""

import json

import pytest
import torch
from PIL import Image
from torch import tensor
from torch.nn.functional import normalize
from torch.testing import assert_close

from flowalign.types import MediaBatch
from reward_models import JpegSize, PickScore
from reward_models.backbones.clip_towers import guide_text
from reward_models.wrappers.d2_align import D2Align, learn_shift, read_listing
from tests.fixtures.golden import GOLDEN
from tests.fixtures.reward_contract import check_fingerprints, example_batch

PICK = str(GOLDEN / "H_pickscore")


def test_a_guided_text_by_hand():
    """(1, 0) shifted by (0, 1): e+, e- are (1, 1), (1, -1) / sqrt 2, and e~ is (1, 2) / sqrt 2."""
    text, root = tensor([[1.0, 0.0]]), 2**0.5
    assert_close(guide_text(text, tensor([0.0, 1.0]), 1.5), tensor([[1 / root, 2 / root]]))
    assert_close(guide_text(text, torch.zeros(2), 1.5), text)


def test_the_direction_raises_the_guided_score_of_all_images():
    draw = torch.Generator().manual_seed(0)
    images, texts = (normalize(torch.randn(6, 8, generator=draw), dim=1) for _ in range(2))
    images = normalize(images + tensor([1.0] + [0.0] * 7), dim=1)  # what they have in common
    shift = learn_shift(images, texts, 1.5, 200, 0.05)
    score = [(images * guide_text(texts, b, 1.5)).sum(1).mean() for b in (0 * shift, shift)]
    assert score[1] > score[0] + 0.1
    assert shift.abs().argmax() == 0


@pytest.fixture
def media(tmp_path):
    rows = []
    for i, one in enumerate(example_batch(3).media):
        pixels = (255 * one[0]).byte().permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
        rows.append(json.dumps({"file_name": f"{i}.png", "prompt": f"a red ball {i}"}))
    (tmp_path / "metadata.jsonl").write_text("\n".join(rows) + "\n")
    return str(tmp_path)


def test_a_reward_without_steps_of_learning_is_the_reward_and_with_them_keeps_its_gradient(media):
    plain = PickScore(PICK, PICK, device="cpu")
    guided = D2Align(PickScore(PICK, PICK, device="cpu"), media, steps=50, learning_rate=0.05)
    batch = example_batch(2)
    before = plain.score(batch).values
    pixels = batch.media.clone().requires_grad_()
    after = guided.score(MediaBatch(pixels, batch.prompts)).values
    assert not torch.allclose(before, after)
    assert torch.autograd.grad(after.sum(), pixels)[0].abs().max() > 0
    guided.reward.network.shift = torch.zeros_like(guided.reward.network.shift)
    assert_close(guided.score(batch).values, before)
    assert guided.spec.dims == ("pickscore_d2",)
    check_fingerprints([plain, guided, D2Align(plain, media, strength=2.0)])


def test_a_prompt_of_a_listing_may_hold_any_character_except_a_line_feed(tmp_path):
    row = json.dumps({"file_name": "0.png", "prompt": "a red\u2028ball"}, ensure_ascii=False)
    (tmp_path / "metadata.jsonl").write_text(row + "\n", encoding="utf-8")
    assert read_listing(str(tmp_path)) == [(tmp_path / "0.png", "a red\u2028ball")]


def test_other_rewards_and_folders_are_refused(tmp_path):
    with pytest.raises(ValueError, match="choose PickScore, HPSv2 or CLIPScore"):
        D2Align(JpegSize(), str(tmp_path))
    with pytest.raises(ValueError, match=r"has no metadata\.jsonl: make images"):
        D2Align(PickScore(PICK, PICK, device="cpu"), str(tmp_path)).load()
