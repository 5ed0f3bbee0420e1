"""What every policy must satisfy: it is the official pipeline, and saves for it."""

import pytest
import torch

from flowalign.sampling.rollout import generate
from flowalign.training.reference import AdapterOff, FrozenCopy, reference_for
from flowalign.utils.seeds import generator
from pipelines.weights import Lora
from tests.fixtures.embedded import move
from tests.fixtures.families import (
    assert_independent_of_the_batch,
    assert_official,
    noise,
    velocity_of,
)


def settings_of(family, trained: str) -> dict:
    return {} if trained == "adapter" else dict(family.other)


def test_latents_and_pictures_are_those_of_the_official_pipeline(family):
    policy = family.new()
    move(policy)
    assert_official(family, policy, family.prompts)


def test_a_sample_does_not_see_the_batch_it_is_in(family, plain):
    assert_independent_of_the_batch(plain, [*family.prompts, "a white circle"])


def test_generate_makes_the_pictures_of_the_pipeline_one_seed_each(family, plain):
    policy = plain
    seeds = [generator(3, "picture", i) for i in range(3)]
    prompts = [family.prompts[1], family.prompts[0], family.prompts[1]]
    latents = generate(policy, prompts, 4, seeds, micro_batch=2)
    again = [generator(3, "picture", i) for i in range(3)]
    x = torch.cat([policy.noise(1, g) for g in again])
    theirs = family.official(policy, prompts, x, 4, "latent")
    torch.testing.assert_close(latents, theirs, atol=1e-4, rtol=1e-4)


def test_a_saved_adapter_gives_the_same_numbers_in_plain_diffusers(tmp_path, family):
    """alpha / rank is 7 / 3: a file without its metadata would be loaded with a factor of 1."""
    policy = family.new()
    move(policy)
    policy.save_weights(str(tmp_path))
    pipe = policy.pipeline_class.from_pretrained(family.path, dtype=torch.float32)
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.float().eval()
    cond, x = policy.encode(family.prompts), noise(policy)
    expected = velocity_of(policy.denoiser, policy, cond, x)
    assert (
        velocity_of(pipe.components[policy.part], policy, cond, x) - expected
    ).abs().max() > 1e-3
    pipe.load_lora_weights(tmp_path)
    assert (
        velocity_of(pipe.components[policy.part], policy, cond, x) - expected
    ).abs().max() == 0.0
    assert policy.verify_weights(str(tmp_path)) == 0.0


@pytest.mark.parametrize("trained", ["adapter", "all weights"])
def test_weights_come_back_bit_for_bit(tmp_path, family, trained):
    settings = settings_of(family, trained)
    policy, other = family.new(**settings), family.new(**settings)
    move(policy)
    policy.save_weights(str(tmp_path))
    assert policy.verify_weights(str(tmp_path)) == 0.0
    assert other.verify_weights(str(tmp_path)) > 0
    other.load_weights(str(tmp_path))
    mine, theirs = policy.denoiser.state_dict(), other.denoiser.state_dict()
    assert mine.keys() == theirs.keys()
    assert [n for n in mine if not torch.equal(mine[n], theirs[n])] == []


def test_fully_trained_weights_load_in_plain_diffusers(tmp_path, family):
    policy = family.new(**family.other)
    move(policy)
    policy.save_weights(str(tmp_path))
    loaded = type(policy.denoiser).from_pretrained(tmp_path / policy.part)
    cond, x = policy.encode(family.other_prompts), noise(policy)
    difference = velocity_of(loaded, policy, cond, x) - velocity_of(
        policy.denoiser, policy, cond, x
    )
    assert difference.abs().max() == 0.0


FOREIGN = {
    "another rank": {"rank": 4, "alpha": 7},
    "other layers": {"rank": 3, "alpha": 7, "few": True},
    "another model": {"rank": 3, "alpha": 7},
    "all weights": None,
}


def adapter(family, layers, rank, alpha, few=False) -> Lora:
    return Lora(rank=rank, alpha=alpha, target_modules=(family.query,) if few else layers)


@pytest.mark.parametrize("foreign", FOREIGN)
def test_weights_of_something_else_are_refused_in_a_few_lines(tmp_path, family, plain, foreign):
    model = family.other if foreign == "another model" else {}
    lora = FOREIGN[foreign] and adapter(family, plain.lora.target_modules, **FOREIGN[foreign])
    other = family.new(**model | {"lora": lora})
    other.save_weights(str(tmp_path))
    policy = plain
    before = {n: p.clone() for n, p in policy.denoiser.state_dict().items()}
    with pytest.raises(ValueError, match=r"another model or adapter|does not exist") as caught:
        policy.load_weights(str(tmp_path))
    assert len(str(caught.value).splitlines()) <= 5
    assert str(tmp_path) in str(caught.value)
    after = policy.denoiser.state_dict()
    assert all(torch.equal(before[n], after[n]) for n in before)


def test_an_adapter_saved_with_another_alpha_is_refused(tmp_path, family, plain):
    """Equal shapes, other strength: loading it silently would scale what was learned."""
    other = family.new(lora=adapter(family, plain.lora.target_modules, 3, 12))
    move(other)
    other.save_weights(str(tmp_path))
    with pytest.raises(ValueError, match="alpha"):
        plain.load_weights(str(tmp_path))


@pytest.mark.parametrize("trained", ["adapter", "small adapter", "all weights", "other model"])
def test_the_plan_agrees_with_the_loaded_model(family, plain, trained):
    small = Lora(rank=5, alpha=1, target_modules=(family.query,))
    settings = {"small adapter": {"lora": small}, "all weights": {"lora": None}}
    settings |= {"other model": family.other}
    policy = plain if trained == "adapter" else family.new(**settings[trained])
    plan, parameters = policy.plan(), list(policy.denoiser.parameters())
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    added = sum(p.numel() for n, p in policy.denoiser.named_parameters() if "lora_" in n)
    assert plan.trainable == trainable > 0
    assert plan.parameters == sum(p.numel() for p in parameters) - added
    assert plan.latent_shape == tuple(noise(policy, 1).shape[1:])
    start = policy.schedule(1)[0]
    assert start == 1 or (policy.part == "unet" and 0.9 < start < 1)
    for num_steps in (1, 7, 40):
        assert torch.equal(plan.sigmas(num_steps), policy.schedule(num_steps))
        assert plan.sigmas(num_steps).shape == (num_steps + 1,)
        assert plan.sigmas(num_steps)[0] == start
        assert plan.sigmas(num_steps)[-1] == 0


def test_the_plan_reads_no_weights(monkeypatch, family):
    def refuse(*arguments, **named):
        raise AssertionError("a weight was read")

    for name in ("safetensors.torch.load_file", "safetensors.safe_open", "torch.load"):
        monkeypatch.setattr(name, refuse)
    monkeypatch.setattr("pipelines.base.load_pipeline", refuse)
    monkeypatch.setattr("torch.nn.Module.load_state_dict", refuse)
    lora = Lora(rank=2, target_modules=(family.query,))
    policy = family.cls(family.path, height=64, width=48, precision="bf16", lora=lora)
    plan = policy.plan()
    _, height, width = plan.latent_shape
    assert height * 48 == width * 64
    assert plan.bytes_per_parameter == 2


@pytest.mark.parametrize(("height", "width"), [(33, 32), (32, 30)])
def test_a_size_that_does_not_fit_is_refused_by_plan_and_load(family, height, width):
    policy = family.cls(family.path, height=height, width=width, precision="fp32")
    for work in (policy.plan, lambda: policy.load(torch.device("cpu"))):
        with pytest.raises(ValueError, match=f"size {width}x{height}: .*multiples of"):
            work()


def test_the_reference_of_an_adapter_is_the_base_model_however_far_it_has_moved(family):
    policy = family.new()
    reference = reference_for(policy)
    assert isinstance(reference, AdapterOff)
    cond, x, sigma = policy.encode(family.prompts), noise(policy), torch.tensor(0.4)
    base = family.new(lora=None).velocity(x, sigma, cond).detach()
    move(policy)
    moved = policy.velocity(x, sigma, cond)
    assert (moved - base).abs().max() > 1e-3
    assert torch.equal(reference.velocity(x, sigma, cond), base)
    assert not reference.velocity(x, sigma, cond).requires_grad
    assert torch.equal(policy.velocity(x, sigma, cond), moved)


def test_the_reference_of_a_whole_model_stays_put_while_the_policy_trains(family):
    policy = family.new(**family.other)
    reference = reference_for(policy)
    assert isinstance(reference, FrozenCopy)
    cond, x, sigma = policy.encode(family.other_prompts), noise(policy), torch.tensor(0.4)
    before = policy.velocity(x, sigma, cond).detach()
    move(policy)
    assert torch.equal(reference.velocity(x, sigma, cond), before)
    assert (policy.velocity(x, sigma, cond) - before).abs().max() > 1e-3


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_velocities_are_float32_and_gradients_reach_the_adapter_only(family, precision):
    policy = family.new(precision=precision)
    move(policy)
    cond, x, sigma = policy.encode(family.prompts), noise(policy), torch.tensor(0.3)
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


def test_bf16_is_close_to_fp32_and_its_adapter_saves_exactly(tmp_path, family):
    exact, rounded = family.new(), family.new(precision="bf16")
    for policy in (exact, rounded):
        move(policy)
    x, sigma = noise(exact), torch.tensor(0.5)
    wanted = exact.velocity(x, sigma, exact.encode(family.prompts))
    got = rounded.velocity(x, sigma, rounded.encode(family.prompts))
    error = (got - wanted).square().mean() / wanted.square().mean()
    assert 0 < error < 0.03**2
    rounded.save_weights(str(tmp_path))
    assert rounded.verify_weights(str(tmp_path)) == 0.0


def test_recomputing_activations_changes_no_gradient(family):
    gradients = []
    for checkpointing in (False, True):
        policy = family.new(gradient_checkpointing=checkpointing)
        move(policy)
        policy.denoiser.train()
        cond = policy.encode(family.prompts)
        policy.velocity(noise(policy), torch.tensor(0.3), cond).square().mean().backward()
        trained = [p for p in policy.denoiser.parameters() if p.requires_grad]
        gradients.append(torch.cat([p.grad.flatten() for p in trained if p.grad is not None]))
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-7, rtol=1e-5)


def test_every_load_starts_from_the_same_adapter_whatever_was_drawn_before(family, plain):
    a = plain
    torch.manual_seed(123)
    drawn = torch.get_rng_state()
    b = family.new()
    assert torch.equal(torch.get_rng_state(), drawn)
    mine, theirs = a.denoiser.state_dict(), b.denoiser.state_dict()
    assert all(torch.equal(mine[n], theirs[n]) for n in mine)
    assert any(float(p.abs().max()) > 0 for n, p in mine.items() if "lora_A" in n)


def test_an_untouched_adapter_is_the_base_model(family, plain):
    policy, base = plain, family.new(lora=None)
    cond, x, sigma = policy.encode(family.prompts), noise(policy), torch.tensor(0.4)
    assert torch.equal(policy.velocity(x, sigma, cond), base.velocity(x, sigma, cond))
