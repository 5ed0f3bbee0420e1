"""Properties of Qwen-Image: norm-preserving guidance, masked prompts, a stretched schedule."""

import pytest
import torch

from flowalign.types import plain_requests
from pipelines.families.qwen_image import QwenImage, restore_norm
from tests.fixtures.embedded import move
from tests.fixtures.families import (
    assert_official,
    assert_one_time_per_row,
    noise,
    official_qwen,
    without_gradient,
)
from tests.fixtures.tiny_qwen_image import build_qwen

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plain_qwen(qwen):
    return qwen.new()


@pytest.mark.parametrize(
    ("height", "width", "guidance"), [(48, 64, 4.0), (64, 32, 1.0), (16, 16, 2.5)]
)
def test_any_size_and_guidance_is_that_of_the_official_pipeline(qwen, height, width, guidance):
    policy = qwen.new(height=height, width=width, guidance=guidance)
    move(policy)
    assert_official(qwen, policy, qwen.prompts)


def test_guidance_keeps_the_norm_of_every_token():
    """Of lengths 5 and 2 the guided vectors (0, 10) and (3, 4) become (0, 5) and (1.2, 1.6)."""
    v = torch.tensor([[[3.0, 4.0], [2.0, 0.0]]])
    guided = torch.tensor([[[0.0, 10.0], [3.0, 4.0]]])
    expected = torch.tensor([[[0.0, 5.0], [1.2, 1.6]]])
    torch.testing.assert_close(restore_norm(v, guided), expected)


def test_guidance_changes_the_velocity_at_two_evaluations(qwen, plain_qwen):
    policy = qwen.new(guidance=4.0)
    x, sigma = noise(policy), torch.tensor(0.5)
    with torch.no_grad():
        guided = policy.velocity(x, sigma, policy.encode(plain_requests(qwen.prompts)))
        plain = plain_qwen.velocity(x, sigma, plain_qwen.encode(plain_requests(qwen.prompts)))
    assert (guided - plain).abs().max() > 1e-3
    assert (policy.evaluations_per_velocity, plain_qwen.evaluations_per_velocity) == (2, 1)


def test_rows_of_different_times_are_the_rows_alone_with_guidance(qwen):
    assert_one_time_per_row(qwen.new(guidance=3.0), qwen.prompts)


def test_conditions_have_one_length_and_a_mask_whatever_is_encoded_together(plain_qwen, qwen):
    """The pipeline pads to the longest prompt of a call, and has no mask without padding."""
    together, alone = (plain_qwen.encode(plain_requests(qwen.prompts[:n])) for n in (2, 1))
    assert together["text"].shape == (2, 256, 48)
    assert together["mask"].dtype == torch.bool
    lengths = together["mask"].sum(1).tolist()
    assert lengths[1] - lengths[0] == len(qwen.prompts[1]) - len(qwen.prompts[0])
    assert torch.equal(alone["mask"], together["mask"][:1])
    torch.testing.assert_close(alone["text"], together["text"][:1], atol=1e-4, rtol=1e-4)


def test_what_stands_in_padding_changes_nothing(plain_qwen, qwen):
    cond, x = plain_qwen.encode(plain_requests(qwen.prompts)), noise(plain_qwen)
    noisy = dict(cond, text=cond["text"].clone())
    noisy["text"][~cond["mask"]] = 7.0
    with torch.no_grad():
        velocity, other = (plain_qwen.velocity(x, torch.tensor(0.5), c) for c in (cond, noisy))
    torch.testing.assert_close(velocity, other, atol=1e-6, rtol=1e-6)


def test_a_longer_prompt_is_cut_as_in_the_official_pipeline(qwen):
    policy = qwen.new(max_sequence_length=180)
    long = [f"{prompt}, {'and more of it ' * 9}" for prompt in qwen.prompts]
    assert policy.encode(plain_requests(long))["mask"].all()
    assert_official(qwen, policy, long, num_steps=2)


def test_the_schedule_is_the_official_one_and_ends_at_the_stretched_sigma(qwen, plain_qwen):
    official_qwen(plain_qwen, qwen.prompts, noise(plain_qwen), 6, "latent")
    official = plain_qwen.pipe.scheduler.sigmas.clone()
    assert torch.equal(plain_qwen.schedule(6), official)
    assert float(official[-2]) == pytest.approx(0.02)
    assert plain_qwen.schedule(1).tolist() == [1.0, 0.0]


def test_a_gradient_reaches_the_adapter_but_for_what_only_makes_the_last_text(qwen):
    """Nothing reads the text tokens that the last block makes of their queries."""
    found = without_gradient(qwen.new(guidance=2.0), qwen.prompts)
    unread = "transformer_blocks.1.attn"
    assert found == {f"{unread}.add_q_proj", f"{unread}.to_add_out"}


def test_a_network_with_guidance_as_an_input_is_refused(tmp_path):
    policy = QwenImage(build_qwen(tmp_path, guidance_embeds=True), height=48, width=64)
    with pytest.raises(ValueError, match="takes guidance as an input"):
        policy.plan()


def test_the_memory_estimate_counts_the_padded_prompt(qwen):
    plan = QwenImage(qwen.path, height=48, width=64, max_sequence_length=100).plan()
    assert plan.activation_bytes == 2 * 34 * (3 * 4 + 100) * 32 * 2
