"""Sana satisfies the contract of policies with Euler steps instead of the folder's solver."""

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler

from flowalign.training.reference import reference_for
from flowalign.types import plain_requests
from pipelines.any_pipeline.any_flow import Call
from pipelines.families.sana import Sana
from pipelines.network.weights import ATTENTION, Lora
from tests.fixtures.embedded import move
from tests.fixtures.families import PROMPTS, noise
from tests.fixtures.image_families import official_sana, sana_latents
from tests.fixtures.policy_contract import PictureContract
from tests.fixtures.tiny_families import family_fixture, sizes
from tests.fixtures.twins import new_any

pytestmark = pytest.mark.slow


family = family_fixture(
    "sana",
    Sana,
    official_sana,
    {"num_attention_heads": 3, "num_cross_attention_heads": 3, "cross_attention_dim": 12},
    query="attn1.to_q",
    latents=sana_latents,
    exports=("diffusers", "merged"),  # and peft below
    comfyui=False,
    guided={"guidance": 3.0},
    cases=sizes("guidance", (32, 64, 1.0), (32, 64, 4.5), (64, 32, 1.0)),
)


class TestSana(PictureContract):
    """On the tiny pipeline."""

    # torch multiplies its transposed tokens in another order where a layer is adapted or a
    # gradient recorded: equal to 2e-6, below
    test_a_saved_adapter_gives_the_same_numbers_in_peft = None
    test_the_reference_of_an_adapter_is_the_base_model_however_far_it_has_moved = None


def test_reference_and_peft_are_equal_but_for_the_order_of_products(family, tmp_path):
    lora = Lora(rank=3, alpha=6, target_modules=ATTENTION)
    policy, base = (family.new(lora=one) for one in (lora, None))
    cond, x, sigma = policy.encode(plain_requests(PROMPTS)), noise(policy), torch.tensor(0.4)
    reference = reference_for(policy)
    expected = base.velocity(x, sigma, cond).detach()
    close = {"atol": 2e-6, "rtol": 0.0}
    torch.testing.assert_close(policy.velocity(x, sigma, cond).detach(), expected, **close)
    move(policy)
    assert (policy.velocity(x, sigma, cond) - expected).abs().max() > 1e-3
    torch.testing.assert_close(reference.velocity(x, sigma, cond), expected, **close)
    assert policy.network.export(policy, str(tmp_path), "peft", "bf16") < 2e-6


def test_the_schedule_is_shifted_once_and_ends_at_zero(plain):
    """3 s / (1 + 2 s) of 1, 3/4, 1/2 and 1/4."""
    torch.testing.assert_close(plain.schedule(4), torch.tensor([1.0, 0.9, 0.75, 0.5, 0.0]))


def test_the_folder_s_solver_at_first_order_is_the_same_velocity_at_its_whole_times(plain):
    """Its sigmas begin at .9997, and the network gets times that are cut to integers."""
    x, pipe = noise(plain), plain.pipe
    solver = DPMSolverMultistepScheduler.from_config(pipe.scheduler.config, solver_order=1)
    before, pipe.scheduler = pipe.scheduler, solver
    made = pipe(
        prompt=list(PROMPTS),
        latents=x,
        height=plain.height,
        width=plain.width,
        num_inference_steps=8,
        guidance_scale=1.0,
        max_sequence_length=plain.max_sequence_length,
        use_resolution_binning=False,
        output_type="latent",
    ).images
    pipe.scheduler = before
    cond = plain.encode(plain_requests(PROMPTS))
    with torch.no_grad():
        for k, time in enumerate(solver.timesteps):
            step = solver.sigmas[k + 1] - solver.sigmas[k]
            x = x + step * plain.velocity(x, time / 1000, cond)
    torch.testing.assert_close(x, made, atol=1e-5, rtol=1e-5)


def test_velocities_are_those_of_the_generic_policy_at_whole_times(family):
    """The generic one follows the folder's solver, which cuts times to integers."""
    policy = family.new(guidance=4.5)
    move(policy)
    given = {"guidance_scale": 4.5, "use_resolution_binning": False}
    given["max_sequence_length"] = policy.max_sequence_length
    call = Call(arguments=given, evaluations=2)
    sizes = {"height": policy.height, "width": policy.width}
    generic = new_any(family.path, call=call, lora=policy.lora, **sizes)
    move(generic)
    x, time = noise(policy), torch.tensor(0.625)
    with torch.no_grad():
        wanted, found = (
            one.velocity(x, time, one.encode(plain_requests(PROMPTS))) for one in (policy, generic)
        )
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_the_adapter_is_on_both_kinds_of_attention(plain):
    """Those of self-attention and of cross attention."""
    adapted = [n for n, _ in plain.denoiser.named_modules() if n.endswith(".lora_A.default")]
    assert len(adapted) == 2 * 8


def test_fp16_is_refused_because_linear_attention_overflows(family):
    with pytest.raises(ValueError, match=r"precision is fp16.*allowed here: bf16, fp32"):
        family.new(precision="fp16")
