"""A policy with user conditioning: the base model before training and for unknown users."""

import dataclasses
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from flowalign.extra.personal import PersonalSD15, PersonalSDXL
from flowalign.training.reference import FrozenCopy, conditional, reference_for
from tests.fixtures.embedded import move
from tests.fixtures.families import assert_weights_come_back, noise, requests_for
from tests.fixtures.tiny_unet import build_sd15, build_sdxl, new_sd15, new_sdxl

pytestmark = pytest.mark.slow

PROMPTS = ("a red ball", "two cats on a sofa", "a cup")


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Any:
    folder = tmp_path_factory.mktemp("personal")
    build_sd15(folder)
    generator = torch.Generator().manual_seed(2)
    users = {name: torch.randn(4, 12, generator=generator) for name in ("ann", "bob")}
    save_file(users, folder / "users.safetensors")
    return folder


def personal(folder, **changes: Any) -> Any:
    defaults: dict[str, Any] = {
        "path": str(folder),
        "users": str(folder / "users.safetensors"),
        "height": 48,
        "width": 64,
        "guidance": 1.0,
        "precision": "fp32",
    }
    policy = PersonalSD15(**defaults | changes)
    policy.load(torch.device("cpu"))
    return policy


def answers(policy, users=("ann", "bob", "")) -> torch.Tensor:
    """Velocities of three equal prompts and states, asked by three users."""
    cond = policy.user_conditioning.add_users(
        policy.encode(requests_for(policy, [PROMPTS[0]] * 3)), users
    )
    x = noise(policy, 1).repeat(3, 1, 1, 1)
    with torch.no_grad():
        return policy.velocity(x, torch.tensor(0.6), cond)


@pytest.mark.parametrize("guidance", [1.0, 3.0], ids=["plain", "guided"])
def test_before_training_every_user_gets_the_base_model(folder, guidance):
    base = new_sd15(str(folder), lora=None, guidance=guidance)
    policy = personal(folder, guidance=guidance)
    x, sigma = noise(base, 3), torch.tensor([0.2, 0.5, 0.9])
    with torch.no_grad():
        wanted = base.velocity(x, sigma, base.encode(requests_for(base, PROMPTS)))
        cond = policy.encode(requests_for(policy, PROMPTS))
        for users in (("ann", "bob", "x"), ("", "", "")):
            got = policy.velocity(x, sigma, policy.user_conditioning.add_users(cond, users))
            torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_after_training_users_differ_and_strangers_get_the_base_model(folder):
    policy = personal(folder)
    base = answers(policy)
    move(policy, 0.3)
    ann, bob, nobody = answers(policy)
    assert (ann - bob).abs().max() > 1e-3
    assert (ann - nobody).abs().max() > 1e-3
    torch.testing.assert_close(nobody, base[2])
    assert torch.equal(answers(policy, ["", "who", ""])[1], nobody)


def test_on_sdxl_users_get_the_base_model_before_training_and_differ_after(folder, tmp_path):
    path, users = build_sdxl(tmp_path), str(folder / "users.safetensors")
    policy = PersonalSDXL(path, users, 48, 64, guidance=3.0, precision="fp32")
    policy.load(torch.device("cpu"))
    base = new_sdxl(path, lora=None, guidance=3.0)
    x, sigma = noise(base, 1).repeat(3, 1, 1, 1), torch.tensor(0.6)
    with torch.no_grad():
        wanted = base.velocity(x, sigma, base.encode(requests_for(base, [PROMPTS[0]] * 3)))
    torch.testing.assert_close(answers(policy), wanted, atol=1e-5, rtol=1e-5)
    move(policy, 0.3)
    ann, bob, nobody = answers(policy)
    assert min((ann - bob).abs().max(), (ann - nobody).abs().max()) > 1e-3
    torch.testing.assert_close(nobody, wanted[2], atol=1e-5, rtol=1e-5)


def test_strength_goes_from_the_base_model_to_the_user_s(folder):
    steps = []
    for strength in (0.0, 0.5, 1.0):
        policy = personal(folder, strength=strength)
        move(policy, 0.3)
        steps.append(answers(policy))
    torch.testing.assert_close(steps[0], answers(personal(folder)))
    assert 0 < (steps[1] - steps[0]).norm() < (steps[2] - steps[0]).norm()


def test_only_attention_to_users_is_trained_and_the_plan_knows_it(folder):
    policy = personal(folder, precision="bf16")
    trained = {n: p for n, p in policy.denoiser.named_parameters() if p.requires_grad}
    assert {name.split(".processor.")[1] for name in trained} == {
        "to_k_ip.0.weight",
        "to_v_ip.0.weight",
    }
    assert {p.dtype for p in trained.values()} == {torch.float32}
    frozen = {p.dtype for p in policy.denoiser.parameters() if not p.requires_grad}
    assert frozen == {torch.bfloat16}
    plan = policy.plan()
    assert plan.trainable == sum(p.numel() for p in trained.values()) > 0
    assert plan == dataclasses.replace(
        policy.base.plan(), trainable=plan.trainable, sigmas=plan.sigmas
    )
    cond = policy.user_conditioning.add_users(
        policy.encode(requests_for(policy, PROMPTS)), ["ann", "bob", "ann"]
    )
    policy.velocity(noise(policy, 3), torch.tensor(0.5), cond).square().mean().backward()
    assert all(p.grad.isfinite().all() for p in trained.values() if p.grad is not None)
    assert sum(float(p.grad.abs().sum()) for p in trained.values() if p.grad is not None) > 0


def test_saved_weights_come_back_bit_for_bit(folder, tmp_path):
    assert_weights_come_back(personal(folder), personal(folder), tmp_path)


def test_weights_of_users_of_another_size_are_refused(folder, tmp_path):
    save_file({"eve": torch.ones(2, 7)}, tmp_path / "users.safetensors")
    other = personal(folder, users=str(tmp_path / "users.safetensors"))
    other.save_weights(str(tmp_path))
    with pytest.raises(ValueError, match="belongs to another model or adapter"):
        personal(folder).load_weights(str(tmp_path))


def test_the_reference_stays_the_base_model_with_the_same_users(folder):
    policy = personal(folder, guidance=3.0)
    reference = reference_for(policy)
    assert isinstance(reference, FrozenCopy)
    before = answers(policy)
    move(policy, 0.3)
    assert torch.equal(answers(reference.policy), before)
    assert (answers(policy) - before).abs().max() > 1e-3


def test_guidance_can_be_dropped_and_its_unconditional_half_knows_no_user(folder):
    policy = personal(folder, guidance=3.0)
    move(policy, 0.3)
    plain: Any = conditional(policy)
    unguided, guided = answers(plain), answers(policy)
    nothing = {**policy.encode(requests_for(policy, [""] * 3))}
    with torch.no_grad():
        x = noise(policy, 1).repeat(3, 1, 1, 1)
        base = plain.velocity(x, torch.tensor(0.6), nothing)
    torch.testing.assert_close(guided, base + 3 * (unguided - base), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "users", [{}, {"a": torch.ones(3, 4), "b": torch.ones(2, 4)}, {"a": torch.ones(3)}]
)
def test_embeddings_of_several_shapes_or_none_are_refused(folder, tmp_path, users):
    save_file(users, tmp_path / "users.safetensors")
    with pytest.raises(ValueError, match=r"users\.safetensors must hold embeddings of one shape"):
        personal(folder, users=str(tmp_path / "users.safetensors"))
