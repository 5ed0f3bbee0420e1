"""Stable Diffusion and SDXL satisfy the contract of policies, and are diffusion models exactly."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import DDIMScheduler, PNDMScheduler

from flowalign.functional.diffusion import flow_sigmas
from flowalign.functional.noise_matching import space_factor
from flowalign.functional.transition import FlowSDE, flow_std, transition
from flowalign.types import plain_requests
from pipelines.families.unet import LORA, SD15, SDXL
from pipelines.parts.memory import unet_activations
from tests.fixtures.embedded import move
from tests.fixtures.families import Family, assert_official, noise, official_unet, requests_for
from tests.fixtures.policy_contract import PictureContract
from tests.fixtures.tiny_families import family_of
from tests.fixtures.tiny_unet import BETAS, TARGETS, build_sd15, new_sd15, new_sdxl

pytestmark = pytest.mark.slow

PROMPTS = ("a red ball", "two cats on a sofa")


class TestUNets(PictureContract):
    """On both families of the fixture `family`."""


@pytest.fixture(scope="module")
def families(tmp_path_factory) -> dict[str, Family]:
    root, narrow = tmp_path_factory.mktemp("unets"), {"block_out_channels": (16, 24)}
    more = {"query": "attn2.to_q", "guided": {"guidance": 3.0}, "cases": [{}, {"guidance": 3.0}]}
    v = narrow | {"prediction_type": "v_prediction"}
    return {
        "sd15": family_of(root / "sd15", "sd15", SD15, official_unet, v, **more),
        "sdxl": family_of(root / "sdxl", "sdxl", SDXL, official_unet, narrow, seeded=False, **more),
    }


@pytest.fixture(scope="module")
def folders(families, tmp_path_factory) -> dict[str, str]:
    data = build_sd15(tmp_path_factory.mktemp("data"), "sample")
    found = {name: family.path for name, family in families.items()}
    return found | {"v": families["sd15"].other["path"], "data": data}


@pytest.fixture(params=["sd15", "sdxl"])
def family(request, families) -> Family:
    return families[request.param]


@pytest.mark.parametrize("guidance", [1.0, 3.0], ids=["plain", "guided"])
@pytest.mark.parametrize("model", ["v", "data"])
def test_pictures_of_every_prediction_type_are_those_of_ddim(families, folders, model, guidance):
    """If the number of steps does not divide 1000, diffusers' steps are off by one timestep."""
    policy = families["sd15"].new(path=folders[model], guidance=guidance)
    move(policy)
    assert_official(families["sd15"], policy, num_steps=5)


@pytest.mark.parametrize(("model", "space"), [("sd15", "noise"), ("v", "v"), ("data", "data")])
def test_errors_of_the_network_are_those_of_the_flow_in_its_own_space(folders, model, space):
    """Squared error of the prediction = factor^2 x squared velocity error at the same state."""
    policy = new_sd15(folders[model])
    generator = torch.Generator().manual_seed(3)
    data, eps = torch.randn(2, 3, *policy.latent_shape, generator=generator)
    times = torch.tensor([40, 500, 961])
    sigma = flow_sigmas(policy.pipe.scheduler.alphas_cumprod)[times]
    cond = policy.encode(requests_for(policy, [*PROMPTS, "a cup"]))
    scheduler = policy.pipe.scheduler
    with torch.no_grad():
        state = scheduler.add_noise(data, eps, times)
        said = policy.denoiser(state, times, cond["text"], return_dict=False)[0]
        s = sigma[:, None, None, None]
        v = policy.velocity((1 - s) * data + s * eps, sigma, cond)
    target = {
        "noise": eps,
        "data": data,
        "v": scheduler.get_velocity(data, eps, times),
    }[space]
    wanted = (said - target).square().mean((1, 2, 3))
    got = space_factor(space, sigma).square() * (v - (eps - data)).square().mean((1, 2, 3))
    torch.testing.assert_close(got, wanted, atol=0, rtol=2e-4)
    assert wanted.unique().numel() == 3


def test_initial_states_are_those_of_a_model_that_sees_noise_of_size_1(folders):
    policy = new_sd15(folders["sd15"], height=256, width=256)
    x, sigma = noise(policy, 8), policy.schedule(7)[0]
    assert float(sigma) == pytest.approx(0.93596, abs=1e-5)  # alpha .068265, s .997667
    torch.testing.assert_close(x.std(), torch.tensor(0.93815), atol=0.01, rtol=0)
    assert (x / flow_std(sigma)).std() == pytest.approx(1, abs=0.01)


def test_an_sde_step_from_the_first_time_is_finite_and_keeps_the_size_of_states(folders):
    """Kernels never needed sigma = 1: of white data, the step has the next state's variance."""
    policy = new_sd15(folders["sd15"])
    sigmas = policy.schedule(20)
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * flow_std(sigmas[0])
    v = x * (2 * sigmas[0] - 1) / flow_std(sigmas[0]) ** 2  # the exact velocity of white data
    step = transition(FlowSDE(), x, v, sigmas, 0, torch.full((64,), 0.3))
    variance = step.mean.var() + step.std[0] ** 2
    torch.testing.assert_close(variance.sqrt(), flow_std(sigmas[1]), atol=0.02, rtol=0)


def test_the_schedule_ignores_spacings_that_start_elsewhere_and_solvers(folders):
    """Published files ask for PNDM with timesteps from 981 down; we use DDIM's from 999."""
    policy = new_sd15(folders["sd15"])
    wanted = policy.schedule(20)
    policy.pipe.scheduler = PNDMScheduler(**BETAS, skip_prk_steps=True)
    assert torch.equal(policy.schedule(20), wanted)
    policy.pipe.scheduler = DDIMScheduler(**BETAS, timestep_spacing="trailing", clip_sample=False)
    policy.pipe.scheduler.set_timesteps(20)
    table = flow_sigmas(policy.pipe.scheduler.alphas_cumprod)
    assert torch.equal(wanted[:-1], table[policy.pipe.scheduler.timesteps])


def test_the_size_that_sdxl_is_told_is_the_policy_s_own(folders):
    cond = new_sdxl(folders["sdxl"], guidance=3.0).encode(plain_requests(PROMPTS))
    assert cond["time_ids"].tolist() == [[48, 64, 0, 0, 48, 64]] * 2
    assert cond.keys() == {"text", "text_neg", "text_embeds", "text_embeds_neg", "time_ids"}
    told = {"text", "text_embeds", "time_ids"}
    assert new_sdxl(folders["sdxl"]).encode(plain_requests(PROMPTS)).keys() == told


def test_sizes_that_sdxl_is_told_change_its_answer(folders):
    policy = new_sdxl(folders["sdxl"])
    cond, x, sigma = policy.encode(requests_for(policy, PROMPTS)), noise(policy), torch.tensor(0.5)
    with torch.no_grad():
        other = policy.velocity(x, sigma, {**cond, "time_ids": cond["time_ids"] + 40})
        assert (other - policy.velocity(x, sigma, cond)).abs().max() > 1e-3


def test_the_default_adapter_is_on_all_attention(folders):
    assert LORA.target_modules == TARGETS
    policy = new_sd15(folders["sd15"], lora=LORA)
    names = [n for n, _ in policy.denoiser.named_parameters() if ".lora_A." in n]
    layers = [n for n, _ in policy.denoiser.named_modules() if n.endswith((".attn1", ".attn2"))]
    assert len(names) == 4 * len(layers) > 0


def test_more_steps_than_times_are_refused(folders):
    policy = new_sd15(folders["sd15"])
    with pytest.raises(ValueError, match=r"number of steps is 1001; .* to 1000"):
        policy.schedule(1001)
    assert len(policy.schedule(1000).unique()) == 1001


def test_the_memory_estimate_counts_the_tokens_of_an_image_and_recomputation(folders):
    """48 x 64 pixels are 6 x 8 tokens; 2 bytes per value."""
    policies = (
        SD15(folders["sd15"], 48, 64, lora=LORA, gradient_checkpointing=recomputed)
        for recomputed in (True, False)
    )
    config = SD15(folders["sd15"]).folder.config("unet")
    found = [policy.plan().activation_bytes for policy in policies]
    assert found == [2 * unet_activations(config, 48, recomputed) for recomputed in (True, False)]


def test_a_merged_pipeline_names_what_it_leaves_out(tmp_path):
    folder = build_sd15(tmp_path / "model")
    file = Path(folder) / "model_index.json"
    unread = {"safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"]}
    file.write_text(json.dumps(json.loads(file.read_text()) | unread))
    policy = new_sd15(folder)
    assert policy.network.export(policy, str(tmp_path / "out"), "merged", "fp32") == 0.0
    assert policy.network.left_out == ["safety_checker"]
