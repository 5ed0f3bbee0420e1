"""Properties of FLUX.1: packed tokens, a size-dependent schedule, guidance as an input."""

import json

import pytest
import torch
from safetensors.torch import load_file

from flowalign.training.reference import unguided
from pipelines.families.flux1 import LORA, Flux1
from tests.fixtures.families import (
    GOLDEN,
    assert_told_alike,
    noise,
    official_flux1,
    ours,
    pack,
    requests_for,
)
from tests.fixtures.golden import Recorded, recorded_velocities
from tests.fixtures.policy_contract import PictureContract
from tests.fixtures.tiny_families import family_fixture, sizes
from tests.fixtures.tiny_flux import build_flux

pytestmark = pytest.mark.slow


family = family_fixture(
    "flux1",
    Flux1,
    official_flux1,
    {"num_attention_heads": 3},
    cases=sizes("embedded_guidance", (48, 64, 2.0), (32, 96, 3.5), (64, 64, 1.0), (16, 16, 7.0)),
)


class TestFlux1(PictureContract):
    pass


@pytest.fixture(scope="module")
def schnell(tmp_path_factory) -> str:
    return build_flux(tmp_path_factory.mktemp("schnell"), guidance_embeds=False)


@pytest.mark.parametrize("run", ["embedded", "embedded1"])
def test_the_network_is_asked_and_obeyed_as_in_the_reference_pipeline(family, run):
    """The recorded weights are too large to keep: their recorded answers stand in for them."""
    recorded = load_file(GOLDEN / "I_flux1.safetensors")
    about = json.loads((GOLDEN / "I_flux1.json").read_text())["values"]
    guidance = about["runs"][run]["guidance_tensor"]
    policy = family.new(**about["call_arguments"], embedded_guidance=guidance)
    x = policy.noise(2, torch.Generator().manual_seed(about["generator_seed"]))
    cond = policy.encode(requests_for(policy, about["prompts"]))
    sigmas = policy.schedule(about["steps"])
    torch.testing.assert_close(sigmas, recorded[f"{run}.sigmas"], atol=1e-6, rtol=0)
    answers = recorded_velocities(recorded, run, recorded[f"{run}.net_in0"])
    answers[0], answers[-1] = (recorded[f"{run}.net_out{n}"] for n in ("0", "_last"))
    network = policy.denoiser = Recorded(answers)
    for k in range(about["steps"]):
        x = x + (sigmas[k + 1] - sigmas[k]) * policy.velocity(x, sigmas[k], cond)
    assert len(network.asked) == about["runs"][run]["calls"]
    assert torch.equal(network.asked[0]["hidden_states"], recorded[f"{run}.net_in0"])
    for k, asked in enumerate(network.asked):
        assert asked["guidance"].tolist() == [guidance, guidance]
        times = recorded[f"{run}.net_t"][k].expand(2)
        torch.testing.assert_close(asked["timestep"], times, atol=1e-6, rtol=0)
        assert asked["encoder_hidden_states"] is cond["text"]
        assert asked["pooled_projections"] is cond["pooled"]
        if k:
            before = recorded[f"{run}.step_latents"][k - 1]
            torch.testing.assert_close(asked["hidden_states"], before, atol=1e-5, rtol=0)
    torch.testing.assert_close(pack(x), recorded[f"{run}.final"], atol=1e-5, rtol=0)


def test_the_schedule_is_the_official_one_and_depends_on_the_size(family):
    schedules = []
    for height, width in ((16, 32), (64, 48)):
        policy = family.new(height=height, width=width)
        sigmas = policy.schedule(6)
        official_flux1(policy, family.prompts, noise(policy), 6, "latent")
        assert torch.equal(sigmas, policy.pipe.scheduler.sigmas)
        schedules.append(sigmas)
    assert (schedules[1] - schedules[0])[1:-1].min() > 0  # more tokens: more time at high noise


def test_the_shift_at_512_pixels_is_that_of_hand(family):
    """1024 tokens: mu = .5 + .65 (1024 - 256) / (4096 - 256) = .63, and e^mu moves sigma = 1/2."""
    sigmas = Flux1(family.path, height=512, width=512).plan().sigmas(2)
    shift = torch.tensor(0.63).exp()
    torch.testing.assert_close(sigmas, torch.tensor([1.0, shift / (shift + 1), 0.0]))


def test_in_bf16_the_network_is_told_the_times_of_the_official_pipeline(family):
    """28 steps: rounding sigma rather than 1000 sigma would be off by 4 of 1000 at some of them."""
    policy = family.new(precision="bf16")
    assert_told_alike(family, policy, 28, noise(policy).bfloat16())


def test_embedded_guidance_changes_the_picture_at_one_evaluation(family):
    weak, strong = family.new(embedded_guidance=1.0), family.new(embedded_guidance=3.5)
    x = noise(weak)
    difference = ours(weak, family.prompts, x, 2) - ours(strong, family.prompts, x, 2)
    assert difference.abs().max() > 1e-4
    assert (strong.evaluations_per_velocity, strong.guidance) == (1, 1.0)
    with pytest.raises(ValueError, match="without classifier-free guidance"):
        unguided(strong)


def test_a_model_without_the_guidance_input_is_its_official_pipeline(family, schnell):
    policy = family.new(path=schnell, embedded_guidance=None)
    x = noise(policy)
    theirs = policy.pipe(
        list(family.prompts),
        height=48,
        width=64,
        num_inference_steps=3,
        latents=pack(x),
        max_sequence_length=24,
        output_type="pt",
    ).images
    pictures = policy.decode(ours(policy, family.prompts, x, 3))
    torch.testing.assert_close(pictures[:, 0], theirs, atol=1e-4, rtol=1e-4)


def test_guidance_that_the_network_cannot_take_is_refused(family, schnell):
    for path, guidance, wanted in ((schnell, 3.5, "None"), (family.path, None, "a number")):
        policy = Flux1(path, embedded_guidance=guidance, precision="fp32")
        for work in (policy.plan, lambda policy=policy: policy.load(torch.device("cpu"))):
            with pytest.raises(ValueError, match=f"embedded_guidance is {guidance}; .*{wanted}"):
                work()


def test_sides_that_only_the_autoencoder_divides_are_refused(family):
    with pytest.raises(ValueError, match="size 48x40: both sides must be multiples of 16"):
        Flux1(family.path, height=40, width=48).plan()


def test_the_adapter_is_on_attention_of_all_blocks_and_on_their_own_feed_forwards(family):
    policy = family.new(lora=LORA)
    adapted = {
        name.removesuffix(".lora_A.default.weight")
        for name, _ in policy.denoiser.named_parameters()
        if name.endswith("lora_A.default.weight")
    }
    expected = {f"transformer_blocks.0.{name}" for name in LORA.target_modules}
    expected |= {f"single_transformer_blocks.0.attn.to_{n}" for n in "qkv"}
    assert adapted == expected
    assert policy.denoiser.peft_config["default"].r == 64


def test_the_memory_estimate_counts_the_prompt_and_both_kinds_of_blocks(family):
    size = {"height": 48, "width": 64, "max_sequence_length": 40}
    once, kept = (
        Flux1(family.path, **size, gradient_checkpointing=recomputed).plan().activation_bytes
        for recomputed in (True, False)
    )
    assert kept == 2 * 34 * (3 * 4 + 40) * 32 * 2
    assert once == (34 + 2) * (3 * 4 + 40) * 32 * 2, "one layer's values, and two layers' inputs"
