"""Krea 2 satisfies the contract of policies; its texts are hidden states of several layers."""

import pytest
import torch

from flowalign.types import plain_requests
from pipelines.families.krea2 import DISTILLED_SHIFT, Krea2
from tests.fixtures.embedded import move
from tests.fixtures.families import assert_unseen, noise, qwen_latents
from tests.fixtures.image_families import official_krea2
from tests.fixtures.policy_contract import PictureContract
from tests.fixtures.tiny_families import family_fixture, sizes
from tests.fixtures.tiny_images import build_krea2, new_krea2

pytestmark = pytest.mark.slow


family = family_fixture(
    "krea2",
    Krea2,
    official_krea2,
    {"num_attention_heads": 3},
    latents=qwen_latents,
    guided={"guidance": 3.0},
    cases=sizes("guidance", (48, 64, 1.0), (48, 64, 5.5), (64, 32, 2.5)),
)


class TestKrea2(PictureContract):
    """On the tiny pipeline."""

    # its norms are kept in float32 in every precision; see below
    test_velocities_are_float32_and_gradients_reach_the_adapter_only = None


def test_in_bf16_norms_stay_in_float32_and_the_adapter_is_trained_in_it(family):
    policy = family.new(precision="bf16")
    dtypes = {n: p.dtype for n, p in policy.denoiser.named_parameters()}
    kept = {n for n, dtype in dtypes.items() if dtype == torch.float32 and "lora_" not in n}
    assert {n.split(".")[-2] for n in kept} == {"norm", "norm1", "norm2", "norm_q", "norm_k"}
    assert all(dtypes[n] == torch.float32 for n in dtypes if "lora_" in n)
    move(policy)
    cond = policy.encode(plain_requests(family.prompts))
    velocity = policy.velocity(noise(policy), torch.tensor(0.3), cond)
    assert velocity.dtype == torch.float32
    velocity.square().mean().backward()
    for name, parameter in policy.denoiser.named_parameters():
        assert (parameter.grad is not None) == ("lora_" in name)


def test_conditions_are_two_layers_of_every_token_and_a_mask(plain, family):
    """The template's end stands behind the padding."""
    cond = plain.encode(plain_requests(family.prompts))
    assert cond["text"].shape[2:] == (2, 48)
    assert cond["mask"].dtype == torch.bool
    assert cond["mask"][:, -1].all()
    lengths = cond["mask"].sum(1).tolist()
    assert lengths[1] - lengths[0] == len(family.prompts[1]) - len(family.prompts[0])
    assert_unseen(plain, cond, ~cond["mask"], 1e-6)


def test_a_distilled_folder_has_one_shift_for_every_size(tmp_path, plain):
    """exp(1.15) / (exp(1.15) + 1 / sigma - 1) at sigma = 1/2 is .7595."""
    path = build_krea2(tmp_path, is_distilled=True)
    policy = new_krea2(path=path)
    assert float(policy.schedule(2)[1]) == pytest.approx(0.75951, abs=1e-4)
    assert DISTILLED_SHIFT == 1.15
    assert torch.equal(policy.schedule(4), new_krea2(path=path, height=96).schedule(4))
    assert not torch.equal(policy.schedule(4), plain.schedule(4))
    official_krea2(policy, ["a"], noise(policy, 1), 4, "latent")
    assert torch.equal(policy.schedule(4), policy.pipe.scheduler.sigmas)


def test_the_adapter_is_also_where_layers_of_a_text_are_fused(plain):
    """In the blocks that fuse the layers of a text."""
    adapted = [n for n, _ in plain.denoiser.named_modules() if n.endswith(".lora_A.default")]
    assert len(adapted) == 5 * (2 + 1 + 1)
    assert sum("text_fusion" in name for name in adapted) == 5 * 2


def test_the_memory_estimate_counts_the_padded_prompt(family):
    plan = Krea2(family.path, height=48, width=64, max_sequence_length=100).plan()
    assert plan.activation_bytes == 2 * 34 * (3 * 4 + 100) * 32 * 2
