"""What every policy must satisfy, for SD3: it is the official pipeline, and saves for it."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from safetensors.torch import load_file

from flowalign.completion import take
from flowalign.functional.transition import FlowSDE
from flowalign.reference import AdapterOff, FrozenCopy, reference_for
from flowalign.rollout import generate
from flowalign.seeds import generator
from flowalign.types import Minibatch
from pipelines.sd3 import SD3
from pipelines.weights import Lora
from tests.embedded import FOLDER, move, new_sd3

GOLDEN = Path("assets/golden")
TINY = {
    "path": str(GOLDEN / "I_sd3_pipeline"), "height": 64, "width": 64, "max_sequence_length": 32,
    "lora": None,
}  # fmt: skip
"""A pipeline of 16 latent channels with three real text encoders, all weights random."""
EMBEDDED_PROMPTS = ["a red circle left of a blue square", "three white triangles"]
TINY_PROMPTS = ["a red ball", "two cats on a sofa"]


def official(policy: SD3, prompts, x, num_steps, output_type):
    """What the pipeline's own `__call__` makes, from text to latents or pictures."""
    return policy.pipe(
        prompts, height=policy.height, width=policy.width, num_inference_steps=num_steps,
        guidance_scale=policy.guidance, negative_prompt="", latents=x, output_type=output_type,
        max_sequence_length=policy.max_sequence_length,
    ).images  # fmt: skip


def ours(policy: SD3, prompts, x, num_steps):
    """Our Euler steps along the policy's own schedule and velocity."""
    cond, sigmas = policy.encode(prompts), policy.schedule(num_steps)
    with torch.no_grad():
        for k in range(num_steps):
            x = x + (sigmas[k + 1] - sigmas[k]) * policy.velocity(x, sigmas[k], cond)
    return x


def noise(policy: SD3, count=2):
    return policy.noise(count, torch.Generator().manual_seed(5))


@pytest.mark.parametrize("guidance", [1.0, 4.5], ids=["plain", "guided"])
@pytest.mark.parametrize("model", ["embedded", "tiny"])
def test_latents_and_pictures_are_those_of_the_official_pipeline(model, guidance):
    settings, prompts = ({}, EMBEDDED_PROMPTS) if model == "embedded" else (TINY, TINY_PROMPTS)
    policy = new_sd3(**settings, guidance=guidance)
    if model == "embedded":
        move(policy)
    x = noise(policy)
    latents = ours(policy, prompts, x, 4)
    theirs = official(policy, prompts, x, 4, "latent")
    assert (latents[0] - latents[1]).abs().max() > 0.1
    torch.testing.assert_close(latents, theirs, atol=1e-4, rtol=1e-4)
    pictures = policy.decode(latents)
    assert pictures.shape == (2, 1, 3, policy.height, policy.width)
    assert pictures.min() >= 0
    assert pictures.max() <= 1
    theirs = official(policy, prompts, x, 4, "pt")
    torch.testing.assert_close(pictures[:, 0], theirs, atol=1e-4, rtol=1e-4)


def test_guidance_changes_the_picture_and_costs_two_evaluations():
    plain, guided = new_sd3(guidance=1.0), new_sd3(guidance=3.0)
    assert (plain.evaluations_per_velocity, guided.evaluations_per_velocity) == (1, 2)
    x = noise(plain)
    difference = ours(plain, EMBEDDED_PROMPTS, x, 2) - ours(guided, EMBEDDED_PROMPTS, x, 2)
    assert difference.abs().max() > 1e-3


def test_latents_are_those_recorded_from_the_reference_pipeline():
    recorded, about = load_file(GOLDEN / "I_sd3.safetensors"), _about()
    policy = new_sd3(**TINY, guidance=1.0)
    x = policy.noise(2, torch.Generator().manual_seed(about["generator_seed"]))
    torch.testing.assert_close(x, recorded["nocfg.net_in0"])
    sigmas = policy.schedule(about["steps"])
    torch.testing.assert_close(sigmas, recorded["nocfg.sigmas"], atol=1e-6, rtol=0)
    cond = policy.encode(about["prompts"])
    with torch.no_grad():
        first = policy.velocity(x, sigmas[0], cond)
    torch.testing.assert_close(first, recorded["nocfg.net_out0"], atol=2e-4, rtol=2e-4)
    final = ours(policy, about["prompts"], x, about["steps"])
    tolerance = 2e-4 * float(recorded["nocfg.final"].abs().max())
    torch.testing.assert_close(final, recorded["nocfg.final"], atol=tolerance, rtol=0)


def _about():
    return json.loads((GOLDEN / "I_sd3.json").read_text())["values"]


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_sample_does_not_see_the_batch_it_is_in(guidance):
    policy = new_sd3(guidance=guidance)
    x, sigma = noise(policy, 3), torch.tensor(0.6)
    cond = policy.encode(["a red circle", "two blue squares", "a white circle above a red square"])
    with torch.no_grad():
        together = policy.velocity(x, sigma, cond)
        for i in range(3):
            one = torch.tensor([i])
            alone = policy.velocity(x[one], sigma, take(cond, one))
            torch.testing.assert_close(together[one], alone, atol=1e-5, rtol=1e-5)


def test_generate_makes_the_pictures_of_the_pipeline_one_seed_each():
    policy = new_sd3()
    seeds = [generator(3, "picture", i) for i in range(3)]
    prompts = [EMBEDDED_PROMPTS[1], EMBEDDED_PROMPTS[0], EMBEDDED_PROMPTS[1]]
    latents = generate(policy, prompts, 3, seeds, micro_batch=2)
    again = [generator(3, "picture", i) for i in range(3)]
    x = torch.cat([policy.noise(1, g) for g in again])
    torch.testing.assert_close(
        latents, official(policy, prompts, x, 3, "latent"), atol=1e-4, rtol=1e-4
    )


def _velocity(module, policy, cond, x):
    mine, policy.denoiser = policy.denoiser, module
    with torch.no_grad():
        out = policy.velocity(x, torch.tensor(0.7), cond)
    policy.denoiser = mine
    return out


def test_a_saved_adapter_gives_the_same_numbers_in_plain_diffusers(tmp_path):
    """alpha / rank is 7 / 3: a file without its metadata would be loaded with a factor of 1."""
    policy = new_sd3()
    move(policy)
    policy.save_weights(str(tmp_path))
    pipe = StableDiffusion3Pipeline.from_pretrained(FOLDER, dtype=torch.float32)
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.float().eval()
    cond, x = policy.encode(EMBEDDED_PROMPTS), noise(policy)
    expected = _velocity(policy.denoiser, policy, cond, x)
    assert (_velocity(pipe.transformer, policy, cond, x) - expected).abs().max() > 1e-3
    pipe.load_lora_weights(tmp_path)
    assert (_velocity(pipe.transformer, policy, cond, x) - expected).abs().max() == 0.0
    assert policy.verify_weights(str(tmp_path)) == 0.0


@pytest.mark.parametrize("settings", [{}, TINY], ids=["adapter", "all weights"])
def test_weights_come_back_bit_for_bit(tmp_path, settings):
    policy, other = new_sd3(**settings), new_sd3(**settings)
    move(policy)
    policy.save_weights(str(tmp_path))
    assert policy.verify_weights(str(tmp_path)) == 0.0
    assert other.verify_weights(str(tmp_path)) > 0
    other.load_weights(str(tmp_path))
    mine, theirs = policy.denoiser.state_dict(), other.denoiser.state_dict()
    assert mine.keys() == theirs.keys()
    assert [n for n in mine if not torch.equal(mine[n], theirs[n])] == []


def test_fully_trained_weights_load_in_plain_diffusers(tmp_path):
    policy = new_sd3(**TINY, guidance=1.0)
    move(policy)
    policy.save_weights(str(tmp_path))
    loaded = type(policy.denoiser).from_pretrained(tmp_path / "transformer")
    cond, x = policy.encode(TINY_PROMPTS), noise(policy)
    difference = _velocity(loaded, policy, cond, x) - _velocity(policy.denoiser, policy, cond, x)
    assert difference.abs().max() == 0.0


FOREIGN = {
    "another rank": {"lora": Lora(rank=4, alpha=7)},
    "other layers": {"lora": Lora(rank=3, alpha=7, target_modules=("attn.to_q",))},
    "another model": TINY | {"lora": Lora(rank=3, alpha=7)},
    "all weights": {"lora": None},
}


@pytest.mark.parametrize("foreign", FOREIGN.values(), ids=FOREIGN)
def test_weights_of_something_else_are_refused_in_a_few_lines(tmp_path, foreign):
    other = new_sd3(**foreign)
    other.save_weights(str(tmp_path))
    policy = new_sd3()
    before = {n: p.clone() for n, p in policy.denoiser.state_dict().items()}
    with pytest.raises(ValueError, match=r"another model or adapter|does not exist") as caught:
        policy.load_weights(str(tmp_path))
    assert len(str(caught.value).splitlines()) <= 5
    assert str(tmp_path) in str(caught.value)
    after = policy.denoiser.state_dict()
    assert all(torch.equal(before[n], after[n]) for n in before)


def test_an_adapter_saved_with_another_alpha_is_refused(tmp_path):
    """Equal shapes, other strength: loading it silently would scale what was learned."""
    other = new_sd3(lora=Lora(rank=3, alpha=12))
    move(other)
    other.save_weights(str(tmp_path))
    with pytest.raises(ValueError, match="alpha"):
        new_sd3().load_weights(str(tmp_path))


@pytest.mark.parametrize(
    "settings",
    [{}, {"lora": Lora(rank=5, alpha=1, target_modules=("attn.to_q",))}, {"lora": None}, TINY],
    ids=["adapter", "small adapter", "all weights", "tiny model"],
)
def test_the_plan_agrees_with_the_loaded_model(settings):
    policy = new_sd3(**settings)
    plan, parameters = policy.plan(), list(policy.denoiser.parameters())
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    adapter = sum(p.numel() for n, p in policy.denoiser.named_parameters() if "lora_" in n)
    assert plan.trainable == trainable > 0
    assert plan.parameters == sum(p.numel() for p in parameters) - adapter
    assert plan.latent_shape == tuple(noise(policy, 1).shape[1:])
    for num_steps in (1, 7, 40):
        assert torch.equal(plan.sigmas(num_steps), policy.schedule(num_steps))
        assert plan.sigmas(num_steps).shape == (num_steps + 1,)
        assert plan.sigmas(num_steps)[0] == 1
        assert plan.sigmas(num_steps)[-1] == 0


def test_the_plan_reads_no_weights(monkeypatch):
    def refuse(*arguments, **named):
        raise AssertionError("a weight was read")

    for name in ("safetensors.torch.load_file", "safetensors.safe_open", "torch.load"):
        monkeypatch.setattr(name, refuse)
    monkeypatch.setattr("pipelines.base.load_pipeline", refuse)
    monkeypatch.setattr("torch.nn.Module.load_state_dict", refuse)
    settings = {"path": FOLDER, "height": 32, "width": 24, "precision": "bf16", "guidance": 1.0}
    plan = SD3(**settings, lora=Lora(rank=2)).plan()
    assert plan.latent_shape[1:] == (8, 6)
    assert plan.bytes_per_parameter == 2


@pytest.mark.parametrize(("height", "width"), [(33, 32), (32, 30)])
def test_a_size_that_does_not_fit_is_refused_by_plan_and_load(height, width):
    policy = SD3(FOLDER, height=height, width=width, precision="fp32")
    for work in (policy.plan, lambda: policy.load(torch.device("cpu"))):
        with pytest.raises(ValueError, match=f"size {width}x{height}: .*multiples of"):
            work()


def test_the_reference_of_an_adapter_is_the_base_model_however_far_it_has_moved():
    policy = new_sd3()
    reference = reference_for(policy)
    assert isinstance(reference, AdapterOff)
    cond, x, sigma = policy.encode(EMBEDDED_PROMPTS), noise(policy), torch.tensor(0.4)
    base = new_sd3(lora=None).velocity(x, sigma, cond).detach()
    move(policy)
    moved = policy.velocity(x, sigma, cond)
    assert (moved - base).abs().max() > 1e-3
    assert torch.equal(reference.velocity(x, sigma, cond), base)
    assert not reference.velocity(x, sigma, cond).requires_grad
    assert torch.equal(policy.velocity(x, sigma, cond), moved)


def test_the_reference_of_a_whole_model_stays_put_while_the_policy_trains():
    policy = new_sd3(**TINY)
    reference = reference_for(policy)
    assert isinstance(reference, FrozenCopy)
    cond, x, sigma = policy.encode(TINY_PROMPTS), noise(policy), torch.tensor(0.4)
    before = policy.velocity(x, sigma, cond).detach()
    move(policy)
    assert torch.equal(reference.velocity(x, sigma, cond), before)
    assert (policy.velocity(x, sigma, cond) - before).abs().max() > 1e-3


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_velocities_are_float32_and_gradients_reach_the_adapter_only(precision):
    policy = new_sd3(precision=precision)
    move(policy)
    cond, x, sigma = policy.encode(EMBEDDED_PROMPTS), noise(policy), torch.tensor(0.3)
    velocity = policy.velocity(x, sigma, cond)
    assert velocity.dtype == torch.float32
    velocity.square().mean().backward()
    for name, p in policy.denoiser.named_parameters():
        assert p.requires_grad == ("lora_" in name)
        assert p.dtype == (
            torch.float32 if p.requires_grad or precision == "fp32" else torch.bfloat16
        )
    grads = [p.grad for p in policy.denoiser.parameters() if p.grad is not None]
    assert all(g.isfinite().all() for g in grads)
    assert sum(float(g.abs().sum()) for g in grads) > 0


def test_bf16_is_close_to_fp32_and_its_adapter_saves_exactly(tmp_path):
    exact, rounded = new_sd3(), new_sd3(precision="bf16")
    for policy in (exact, rounded):
        move(policy)
    x, sigma = noise(exact), torch.tensor(0.5)
    wanted = exact.velocity(x, sigma, exact.encode(EMBEDDED_PROMPTS))
    got = rounded.velocity(x, sigma, rounded.encode(EMBEDDED_PROMPTS))
    error = (got - wanted).square().mean() / wanted.square().mean()
    assert 0 < error < 0.03**2
    rounded.save_weights(str(tmp_path))
    assert rounded.verify_weights(str(tmp_path)) == 0.0


def test_recomputing_activations_changes_no_gradient():
    gradients = []
    for checkpointing in (False, True):
        policy = new_sd3(gradient_checkpointing=checkpointing)
        move(policy)
        policy.denoiser.train()
        cond = policy.encode(EMBEDDED_PROMPTS)
        policy.velocity(noise(policy), torch.tensor(0.3), cond).square().mean().backward()
        trained = [p for p in policy.denoiser.parameters() if p.requires_grad]
        gradients.append(torch.cat([p.grad.flatten() for p in trained if p.grad is not None]))
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-7, rtol=1e-5)


def test_every_load_starts_from_the_same_adapter_whatever_was_drawn_before():
    a = new_sd3()
    torch.manual_seed(123)
    drawn = torch.get_rng_state()
    b = new_sd3()
    assert torch.equal(torch.get_rng_state(), drawn)
    mine, theirs = a.denoiser.state_dict(), b.denoiser.state_dict()
    assert all(torch.equal(mine[n], theirs[n]) for n in mine)
    assert any(float(p.abs().max()) > 0 for n, p in mine.items() if "lora_A" in n)


def test_an_untouched_adapter_is_the_base_model():
    policy, base = new_sd3(), new_sd3(lora=None)
    cond, x, sigma = policy.encode(EMBEDDED_PROMPTS), noise(policy), torch.tensor(0.4)
    assert torch.equal(policy.velocity(x, sigma, cond), base.velocity(x, sigma, cond))


def test_a_transition_replayed_from_a_minibatch_uses_the_guided_velocity():
    policy = new_sd3(guidance=2.5)
    cond, x, sigmas = policy.encode(EMBEDDED_PROMPTS), noise(policy), policy.schedule(4)
    eta = torch.tensor([0.5, 0.5])
    batch = Minibatch(
        k=2, x=x, x_next=x, logp_old=eta, advantage=eta, weight=eta, sigmas=sigmas, eta=eta,
        kernel=FlowSDE(), cond=cond,
    )  # fmt: skip
    got = batch.transition(policy).mean
    other = dataclasses.replace(batch, k=1).transition(policy).mean
    v, s, t = policy.velocity(x, sigmas[2], cond), sigmas[2], sigmas[3]
    c1 = t - 0.25 * s / (1 - s) * (s - t) / (2 * s)
    torch.testing.assert_close(got, (1 - t) * (x - s * v) + c1 * (x + (1 - s) * v))
    assert (got - other).abs().max() > 1e-3
