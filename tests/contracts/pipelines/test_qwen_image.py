"""Properties of Qwen-Image: norm-preserving guidance, masked prompts, a stretched schedule."""

import pytest
import torch

from flowalign.types import plain_requests
from pipelines.families.qwen_image import QwenImage, restore_norm
from tests.fixtures.families import (
    assert_official,
    assert_unseen,
    noise,
    official_qwen,
    qwen_latents,
)
from tests.fixtures.policy_contract import PictureContract
from tests.fixtures.tiny_families import family_fixture, sizes
from tests.fixtures.tiny_qwen_image import build_qwen

pytestmark = pytest.mark.slow


family = family_fixture(
    "qwen_image",
    QwenImage,
    official_qwen,
    {"num_attention_heads": 3},
    latents=qwen_latents,
    guided={"guidance": 3.0},
    unreached={"transformer_blocks.1.attn.add_q_proj", "transformer_blocks.1.attn.to_add_out"},
    cases=sizes("guidance", (48, 64, 4.0), (64, 32, 1.0), (16, 16, 2.5)),
)


class TestQwenImage(PictureContract):
    pass


def test_guidance_keeps_the_norm_of_every_token():
    """Of lengths 5 and 2 the guided vectors (0, 10) and (3, 4) become (0, 5) and (1.2, 1.6)."""
    v = torch.tensor([[[3.0, 4.0], [2.0, 0.0]]])
    guided = torch.tensor([[[0.0, 10.0], [3.0, 4.0]]])
    expected = torch.tensor([[[0.0, 5.0], [1.2, 1.6]]])
    torch.testing.assert_close(restore_norm(v, guided), expected)


def test_conditions_have_one_length_and_a_mask_whatever_is_encoded_together(plain, family):
    """The pipeline pads to the longest prompt of a call, and has no mask without padding."""
    together, alone = (plain.encode(plain_requests(family.prompts[:n])) for n in (2, 1))
    assert together["text"].shape == (2, 256, 48)
    assert together["mask"].dtype == torch.bool
    lengths = together["mask"].sum(1).tolist()
    assert lengths[1] - lengths[0] == len(family.prompts[1]) - len(family.prompts[0])
    assert torch.equal(alone["mask"], together["mask"][:1])
    torch.testing.assert_close(alone["text"], together["text"][:1], atol=1e-4, rtol=1e-4)


def test_what_stands_in_padding_changes_nothing(plain, family):
    cond = plain.encode(plain_requests(family.prompts))
    assert_unseen(plain, cond, ~cond["mask"], 1e-6)


def test_a_longer_prompt_is_cut_as_in_the_official_pipeline(family):
    policy = family.new(max_sequence_length=180)
    long = [f"{prompt}, {'and more of it ' * 9}" for prompt in family.prompts]
    assert policy.encode(plain_requests(long))["mask"].all()
    assert_official(family, policy, long, num_steps=2)


def test_the_schedule_is_the_official_one_and_ends_at_the_stretched_sigma(family, plain):
    official_qwen(plain, family.prompts, noise(plain), 6, "latent")
    official = plain.pipe.scheduler.sigmas.clone()
    assert torch.equal(plain.schedule(6), official)
    assert float(official[-2]) == pytest.approx(0.02)
    assert plain.schedule(1).tolist() == [1.0, 0.0]


def test_a_network_with_guidance_as_an_input_is_refused(tmp_path):
    policy = QwenImage(build_qwen(tmp_path, guidance_embeds=True), height=48, width=64)
    with pytest.raises(ValueError, match="guidance_embeds of its transformer is True"):
        policy.plan()


def test_the_memory_estimate_counts_the_padded_prompt(family):
    plan = QwenImage(family.path, height=48, width=64, max_sequence_length=100).plan()
    assert plan.activation_bytes == 2 * 34 * (3 * 4 + 100) * 32 * 2
