"""Properties of Qwen-Image-Edit Plus: one or more images, which the text encoder also sees."""

from dataclasses import replace

import pytest
import torch

from flowalign.types import Request
from pipelines.families.qwen_image_edit import QwenImageEdit, References
from tests.fixtures.embedded import move
from tests.fixtures.families import (
    assert_official,
    noise,
    official_qwen_edit,
    ours,
    qwen_latents,
    rows,
)
from tests.fixtures.pictures import EDITS, picture
from tests.fixtures.policy_contract import PictureContract
from tests.fixtures.tiny_families import family_fixture

pytestmark = pytest.mark.slow

SEVERAL = (EDITS[0], Request("put the first on the second", (picture(2), picture(3, 96, 70))))
"""Requests with one image, and with two images of different sizes."""


family = family_fixture(
    "qwen_image_edit",
    QwenImageEdit,
    official_qwen_edit,
    {"num_attention_heads": 3, "zero_cond_t": True},
    latents=qwen_latents,
    guided={"guidance": 3.0},
    unreached={"transformer_blocks.1.attn.add_q_proj", "transformer_blocks.1.attn.to_add_out"},
)


class TestQwenImageEdit(PictureContract):
    pass


@pytest.mark.parametrize("guidance", [1.0, 4.0], ids=["plain", "guided"])
@pytest.mark.parametrize("model", ["first", "second"])
def test_requests_of_one_and_two_pictures_are_the_official_pipeline_s(family, guidance, model):
    """The second model modulates images as at time 0."""
    path = {"first": family.path, "second": family.other["path"]}[model]
    policy = family.new(path=path, guidance=guidance)
    move(policy)
    assert_official(family, policy, SEVERAL)


def test_the_size_of_pictures_does_not_follow_the_policy_s(family):
    policy = family.new(height=32, width=64, references=References(area=96 * 96))
    assert policy.reference_grid == (4, 8)  # 64 x 128 pixels: sides are multiples of 32
    edits = [replace(e, references=(picture(k, 32, 64),)) for k, e in enumerate(EDITS)]
    assert_official(family, policy, edits, num_steps=2)


def test_rows_of_several_numbers_of_pictures_are_the_rows_alone(plain):
    requests = [*SEVERAL, replace(SEVERAL[1], references=SEVERAL[1].references[::-1])]
    cond, x = plain.encode(requests), noise(plain, 3)
    assert cond["count"].tolist() == [1, 2, 2]
    assert cond["sources"].shape == (3, 2, 16, 8, 8)
    sigma = torch.tensor([0.2, 0.5, 0.8])
    with torch.no_grad():
        together = plain.velocity(x, sigma, cond)
        for k in range(3):
            alone = plain.velocity(x[k : k + 1], sigma[k], rows(cond, k))
            torch.testing.assert_close(together[k : k + 1], alone, atol=1e-5, rtol=1e-5)


def test_the_order_of_pictures_and_the_second_one_matter(plain):
    one, two = SEVERAL[1].references
    requests = [replace(SEVERAL[1], references=given) for given in ((one, two), (two, one), (one,))]
    x, cond = noise(plain, 1).expand(3, -1, -1, -1), plain.encode(requests)
    with torch.no_grad():
        v = plain.velocity(x, torch.tensor(0.5), cond)
    assert (v[1:] - v[0]).flatten(1).abs().amax(1).min() > 1e-3


def test_pictures_reach_the_network_and_the_text_encoder_and_the_negative_prompt(family):
    policy = family.new(guidance=2.0)
    swapped = [replace(a, references=b.references) for a, b in zip(EDITS, EDITS[::-1], strict=True)]
    mine, theirs = policy.encode(EDITS), policy.encode(swapped)
    for name in ("sources", "text", "text_neg"):
        assert (mine[name] - theirs[name]).abs().max() > 1e-3
    assert torch.equal(mine["mask_neg"][0], mine["mask_neg"][1])


@pytest.mark.parametrize("count", [0, 3])
def test_fewer_pictures_than_one_and_more_than_the_policy_takes_are_refused(plain, count):
    edit = Request("make it red", (picture(1),) * count)
    with pytest.raises(ValueError, match=f"takes 1 to 2 source references, .* has {count}"):
        plain.encode([edit])


def test_an_instruction_that_is_too_long_with_its_pictures_is_refused_and_not_cut(plain):
    edit = replace(SEVERAL[1], prompt="make it red " * 30)
    with pytest.raises(ValueError, match=r"with its 2 images has \d+ tokens; .* is 640"):
        plain.encode([edit])


def test_the_memory_estimate_counts_the_tokens_of_all_pictures(family):
    for n in (1, 3):
        references = References(most=n, area=64 * 64, max_tokens=100)
        plan = QwenImageEdit(family.path, height=48, width=64, references=references).plan()
        assert plan.activation_bytes == 2 * 34 * (3 * 4 + 4 * 4 * n + 100) * 32 * 2


def test_an_area_without_a_token_is_refused(family):
    tiny = References(area=10)
    policy = QwenImageEdit(family.path, height=48, width=64, references=tiny)
    with pytest.raises(
        ValueError, match=r"references\.area is 10: images of 0x0 are smaller than one token"
    ):
        policy.plan()


def test_the_size_of_pictures_is_part_of_the_encoders_names(family, plain):
    larger = replace(plain.references, area=96 * 96)
    assert family.new(references=larger).encoders()[1] != plain.encoders()[1]


def test_one_picture_gives_the_latents_of_the_official_pipeline_alone(family, plain):
    x = noise(plain, 1)
    official = family.official(plain, EDITS[:1], x, 3, "latent")
    torch.testing.assert_close(ours(plain, EDITS[:1], x, 3), official, atol=2e-6, rtol=1e-6)
