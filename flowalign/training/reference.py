"""Provide the velocity fields that a policy is compared with: itself before training, or others."""

import copy
from contextlib import nullcontext

import torch
from torch import Tensor

from flowalign.sampling.prompt_guidance import without_guidance
from flowalign.training.ema import EMA
from flowalign.training.trained_weights import TrainedWeights
from flowalign.types import Cond, Policy, Request, VelocityField, encode_requests
from flowalign.utils.adapters import adapters_of, adapters_off


class AdapterOff(VelocityField):
    """Uses the policy's own weights with LoRA adapters switched off: no copy in memory."""

    def __init__(self, policy: Policy):
        self.policy = policy

    @torch.no_grad()
    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return the base model's dx / dsigma."""
        with adapters_off(self.policy.denoiser):
            return self.policy.velocity(x, sigma, cond)


class FrozenCopy(VelocityField):
    """Copies the denoiser as it is now, for full fine-tuning."""

    def __init__(self, policy: Policy):
        self.policy = copy.copy(policy)
        frozen_copy = policy.network.frozen_copy if policy.network else None
        self.policy.denoiser = (
            frozen_copy() if frozen_copy else copy.deepcopy(policy.denoiser).requires_grad_(False)
        )

    @torch.no_grad()
    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return the copy's dx / dsigma."""
        return self.policy.velocity(x, sigma, cond)


class WeightOverride(VelocityField):
    """Evaluates the policy with other values of its trained parameters, and restores them at once.

    Evaluate it before the policy: values written in place are no longer those of the policy's
    autograd graph. Where trained parameters are divided among processes, another process may gather
    them meanwhile: there the average becomes the parameters of a network of its own.
    """

    def __init__(self, policy: Policy, weights: EMA):
        self.policy, self.weights = policy, weights
        frozen_copy = policy.network.frozen_copy if policy.network else None
        self.exchanges = frozen_copy is None
        """Whether the policy's network evaluates; else the average's own does."""
        if frozen_copy is not None:
            self.policy = copy.copy(policy)
            self.policy.denoiser = frozen_copy()
            weights.move(list(self.policy.denoiser.parameters()))

    @torch.no_grad()
    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return dx / dsigma under the other values."""
        with self.weights.applied() if self.exchanges else nullcontext():
            return self.policy.velocity(x, sigma, cond)


class Guided(VelocityField):
    """Evaluates the weights of another field, or of the policy, with guidance of its own scale.

    The guidance is classifier-free, and nothing gets a gradient.

    Raises:
        ValueError: The policy has no guidance, or cannot encode the empty prompt alone.
    """

    def __init__(self, field: VelocityField, guidance: float):
        plain = _policy(field)
        policy = copy.copy(plain)
        self.field = _with_policy(field, policy)
        policy.guidance, policy.evaluations_per_velocity = guidance, 2
        guided = plain.evaluations_per_velocity > 1
        self.empty: dict[str, Tensor] = {}
        if not (guided and plain.input_spec.references[1]):  # which only requests have
            self.empty = _unconditional(_without_guidance(plain) if guided else plain, policy)

    @torch.no_grad()
    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return the guided dx / dsigma."""
        empty = {name: row.expand(len(x), *row.shape[1:]) for name, row in self.empty.items()}
        return self.field.velocity(x, sigma, {**empty, **cond})


def _unconditional(plain: Policy, guided: Policy) -> dict[str, Tensor]:
    """Return the conditioning on the empty prompt that only a guided policy has, in one row."""
    if plain.input_spec.references[1]:
        raise ValueError(
            "guidance needs conditioning on the empty prompt, which a policy that takes "
            "references encodes only with guidance: set policy.guidance above 1"
        )
    empty = [Request(prompt="")]
    encoded, known = encode_requests(guided, empty), encode_requests(plain, empty)
    if encoded.keys() == known.keys():
        raise ValueError(
            f"guidance is {guided.guidance}, but {type(plain).__name__} has no "
            "classifier-free guidance: leave it out"
        )
    return {name: row for name, row in encoded.items() if name not in known}


def conditional(field: VelocityField) -> VelocityField:
    """Return the same weights without classifier-free guidance, if there is any.

    A field that is `Guided` stays so.
    """
    if isinstance(field, Guided):
        return field
    return field if _policy(field).evaluations_per_velocity == 1 else unguided(field)


def unguided(field: VelocityField) -> VelocityField:
    """Return the same weights without classifier-free guidance.

    Raises:
        ValueError: The policy samples without guidance.
    """
    return _with_policy(field, _without_guidance(_policy(field)))


def _policy(field: VelocityField) -> Policy:
    return field if isinstance(field, Policy) else _around(field).policy


def _with_policy(field: VelocityField, policy: Policy) -> VelocityField:
    """Return the same weights evaluated by another shell of the policy."""
    if isinstance(field, Policy):
        return policy
    inner = copy.copy(_around(field))
    inner.policy = policy
    return inner


def _around(field: VelocityField) -> AdapterOff | FrozenCopy | WeightOverride | TrainedWeights:
    assert isinstance(field, AdapterOff | FrozenCopy | WeightOverride | TrainedWeights)
    return field


def _without_guidance(policy: Policy) -> Policy:
    if policy.evaluations_per_velocity == 1:
        raise ValueError(
            "completion.guidance is off, but the policy samples without classifier-free guidance; "
            "leave it at same"
        )
    return without_guidance(policy)


def reference_for(policy: Policy) -> VelocityField:
    """Return the model without its adapter, else a frozen copy. Call it before the first update."""
    return AdapterOff(policy) if adapters_of(policy.denoiser) else FrozenCopy(policy)
