"""Weights and velocity fields next to the policy: averages, further trained weights, references."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from flowalign.sampling.inference import without_guidance
from flowalign.types import Cond, Policy, Request, VelocityField, encode_requests
from flowalign.types.policy import with_denoiser, with_guidance
from flowalign.utils.adapters import adapters_of, adapters_off
from flowalign.utils.ranges import (
    Decay,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Settings,
    UnitInterval,
)


@dataclass(frozen=True, kw_only=True)
class Ema(Settings, key="ema"):
    """Settings of averaged weights, which are evaluated and saved with the current weights."""

    decay: Decay = 0.9
    """Decay of the average, in [0, 1). Default: 0.9, as in Flow-GRPO's code."""
    every: PositiveInt = 1
    """Number of optimizer updates between two averagings. Flow-GRPO's code: 8."""


@dataclass(frozen=True, kw_only=True)
class Ramp(Settings, key="decay"):
    """Schedule of an average's decay: constant for `flat` averagings, then a linear ramp.

    The decay of averaging n, counted from 1, is `start` if n <= flat, else min(start + (n - flat)
    slope, highest). The schedules in DiffusionNFT's code, arXiv:2509.16117, are: decay 0 (a copy);
    slope 0.001 up to 0.5; flat 75 and slope 0.0075 up to 0.999.
    """

    start: UnitInterval = 0.0
    """Decay during the first `flat` averagings. 0: copies the policy. 1: keeps the average."""
    flat: NonNegativeInt = 0
    """Number of averagings before the ramp."""
    slope: NonNegativeFloat = 0.0
    """Increase of the decay per averaging on the ramp."""
    highest: Decay
    """Upper bound of the decay on the ramp, in [0, 1)."""

    def at(self, n: int) -> float:
        """Return the decay of averaging n, counted from 1."""
        if n <= self.flat:
            return self.start
        return min(self.start + (n - self.flat) * self.slope, self.highest)


class EMA:
    """Moving average: average <- decay * average + (1 - decay) * parameters.

    It is updated every `every` optimizer updates or, with `per` step, after each training step. If
    `decay` is a number, the decay after n averagings is min(decay, (1 + n) / (10 + n)), so that the
    initial weights do not dominate. If `decay` is a function, it returns the decay of averaging n,
    counted from 1.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        decay: float | Callable[[int], float],
        every: int = 1,
        per: Literal["update", "step"] = "update",
    ):
        if every < 1 or (not callable(decay) and not 0 <= decay < 1):
            raise ValueError(
                f"ema decay {decay}, every {every}: decay must be in [0, 1), every at least 1"
            )
        self.parameters, self.every, self.per = list(parameters), every, per
        self.decay = decay if callable(decay) else lambda n: min(decay, n / (9 + n))
        self.average = [p.detach().clone() for p in self.parameters]
        self.num_updates = 0

    def update(self, optimizer_step: int) -> None:
        """Include the parameters after every `every` optimizer updates, if `per` is update."""
        if self.per == "update" and optimizer_step % self.every == 0:
            self._include()

    def end_step(self) -> None:
        """Include the parameters after a training step, if `per` is step."""
        if self.per == "step":
            self._include()

    @torch.no_grad()
    def _include(self) -> None:
        self.num_updates += 1
        weight = 1 - self.decay(self.num_updates)
        torch._foreach_lerp_(self.average, [p.detach() for p in self.parameters], weight)

    def restart(self) -> None:
        """Reset the average to the current parameters."""
        _copy(self.parameters, self.average)

    def move(self, places: Sequence[Tensor]) -> None:
        """Store the average in the tensors `places` from now on."""
        _copy(self.average, places)
        self.average = list(places)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Set the parameters to the average inside the context, and restore them afterwards."""
        kept = [p.detach().clone() for p in self.parameters]
        self.write()
        try:
            yield
        finally:
            _copy(kept, self.parameters)

    def write(self) -> None:
        """Set the parameters to the average."""
        _copy(self.average, self.parameters)


@torch.no_grad()
def _copy(values: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    for value, place in zip(values, places, strict=True):
        place.copy_(value)


class TrainedSet(ABC):
    """Parameters that are trained in addition to the policy's."""

    named: Mapping[str, nn.Parameter]
    """Parameters by name."""

    @abstractmethod
    def active(self) -> AbstractContextManager[None]:
        """Return a context in which the parameters are used and differentiable."""


class TrainedWeights(TrainedSet, VelocityField):
    """Policy evaluated with another set of trained weights, differentiable in them.

    Parameter objects are swapped during an evaluation: gradients are bitwise equal whether or not
    another set is evaluated in between. Copying values would invalidate graphs, and peft's adapters
    support only LoRA. Networks that recompute activations in the backward pass also need the
    weights there. Call `backward` inside `active`, as `Learner.backward` does. Compiled networks
    with swapped parameters are not tested.
    """

    def __init__(self, policy: Policy, values: Mapping[str, Tensor] | None = None):
        """Set the weights to `values`, by parameter name; None copies the policy's weights.

        `values` are shared, not copied, and get no gradient.
        """
        self.policy = policy
        own = {n: p for n, p in policy.denoiser.named_parameters() if p.requires_grad}
        self.named = {
            name: nn.Parameter(p.detach().clone())
            if values is None
            else nn.Parameter(values[name], requires_grad=False)
            for name, p in own.items()
        }
        """Parameters by their names in the network."""
        owner = {id(p): name for name, p in own.items()}
        self.places = [
            (module, attribute, owner[id(p)])
            for module in policy.denoiser.modules()
            for attribute, p in module.named_parameters(recurse=False, remove_duplicate=False)
            if id(p) in owner
        ]
        """Module, attribute and name of every place where the network reads a parameter."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Replace the network's parameters by the weights inside the context."""
        before = [getattr(module, attribute) for module, attribute, _ in self.places]
        for module, attribute, name in self.places:
            setattr(module, attribute, self.named[name])
        try:
            yield
        finally:
            for (module, attribute, _), parameter in zip(self.places, before, strict=True):
                setattr(module, attribute, parameter)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return dx / dsigma with the weights, differentiable in them."""
        with self.active():
            return self.policy.velocity(x, sigma, cond)


class AdapterOff(VelocityField):
    """Policy with its LoRA adapters disabled, which needs no copy of the weights."""

    def __init__(self, policy: Policy):
        self.policy = policy

    @torch.no_grad()
    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return the base model's dx / dsigma."""
        with adapters_off(self.policy.denoiser):
            return self.policy.velocity(x, sigma, cond)


def pull_back(
    field: VelocityField, x: Tensor, sigma: Tensor, cond: Cond, vector: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the field's velocity at x and its Jacobian's transpose times a vector.

    Neither has a gradient. The weights of the field are active in the backward pass too, because
    gradient checkpointing evaluates the network there again.
    """
    off = adapters_off(_policy(field).denoiser) if isinstance(field, AdapterOff) else nullcontext()
    with off, torch.enable_grad():
        leaf = x.detach().requires_grad_()
        v = _policy(field).velocity(leaf, sigma, cond)
        (pulled,) = torch.autograd.grad(v, leaf, vector)
    return v.detach(), pulled


class FrozenCopy(VelocityField):
    """Frozen copy of the current denoiser, for full fine-tuning."""

    def __init__(self, policy: Policy):
        make = policy.network.frozen_copy if policy.network else None
        copied = make() if make else copy.deepcopy(policy.denoiser).requires_grad_(False)
        self.policy = with_denoiser(policy, copied)

    @torch.no_grad()
    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return the copy's dx / dsigma."""
        return self.policy.velocity(x, sigma, cond)


class WeightOverride(VelocityField):
    """Policy evaluated with the weights of an average, which are written in place temporarily.

    Evaluate it before the policy, because in-place writes invalidate the policy's autograd graph.
    If trained parameters are sharded, another process may gather them at the same time. The average
    then has a separate network instead.
    """

    def __init__(self, policy: Policy, weights: EMA):
        self.policy, self.weights = policy, weights
        frozen_copy = policy.network.frozen_copy if policy.network else None
        self.exchanges = frozen_copy is None
        """Whether the weights are swapped in the policy's network instead of a separate one."""
        if frozen_copy is not None:
            self.policy = with_denoiser(policy, frozen_copy())
            weights.move(list(self.policy.denoiser.parameters()))

    @torch.no_grad()
    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return dx / dsigma with the average's weights."""
        with self.weights.applied() if self.exchanges else nullcontext():
            return self.policy.velocity(x, sigma, cond)


class Guided(VelocityField):
    """Another velocity field with classifier-free guidance at a given scale, without gradient.

    Raises:
        ValueError: The policy has no guidance, or cannot encode only the empty prompt.
    """

    def __init__(self, field: VelocityField, guidance: float):
        plain = _policy(field)
        policy = with_guidance(plain, guidance)
        self.field = _with_policy(field, policy)
        self.empty: dict[str, Tensor] = {}
        guided = plain.evaluations_per_velocity > 1
        if not (guided and plain.input_spec.references[1]):  # references come with requests
            self.empty = _unconditional(without_guidance(plain), policy)

    @torch.no_grad()
    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return the guided dx / dsigma."""
        empty = {name: row.expand(len(x), *row.shape[1:]) for name, row in self.empty.items()}
        return self.field.velocity(x, sigma, {**empty, **cond})


def find_scale(policy: Policy, scale: float | str) -> float:
    """Return a guidance scale as a number; `model` selects the policy's scale in the run file."""
    return policy.model_guidance if isinstance(scale, str) else scale


def guide(field: VelocityField, policy: Policy, scale: float | str) -> VelocityField:
    """Return the field with guidance at a scale, or the unchanged field for scales up to 1."""
    found = find_scale(policy, scale)
    return Guided(field, found) if found > 1 else field


def check_guidance(policy: Policy, scale: float, key: str) -> None:
    """Raise ValueError unless the policy supports guidance at a scale.

    `key` is the key of the scale in run files.
    """
    problem = "" if policy.has_guidance else f"has no classifier-free guidance: set {key} to model"
    if policy.input_spec.references[1]:
        problem = problem or (
            "takes references, and its conditioning on the empty prompt is not encoded with them "
            f"here: set {key} to 1, or leave guidance out"
        )
    if scale > 1 and problem:
        raise ValueError(f"{key} is {scale}, but {type(policy).__name__} {problem}")


def _unconditional(plain: Policy, guided: Policy) -> dict[str, Tensor]:
    """Return one row of the empty prompt's conditioning, with the keys that guidance adds."""
    if plain.input_spec.references[1]:
        remedy = "a policy with references encodes only with guidance: set policy.guidance above 1"
        raise ValueError(f"guidance needs the conditioning on an empty prompt, which {remedy}")
    empty = [Request(prompt="")]
    encoded, known = encode_requests(guided, empty), encode_requests(plain, empty)
    if encoded.keys() == known.keys():
        raise ValueError(
            f"guidance is {guided.guidance}, but {type(plain).__name__} has no "
            "classifier-free guidance: leave it out"
        )
    return {name: row for name, row in encoded.items() if name not in known}


def conditional(field: VelocityField) -> VelocityField:
    """Return the field without the policy's classifier-free guidance.

    A field of class `Guided` is returned unchanged.
    """
    if isinstance(field, Guided):
        return field
    return _with_policy(field, without_guidance(_policy(field)))


def unguided(field: VelocityField) -> VelocityField:
    """Return the field without classifier-free guidance.

    Raises:
        ValueError: The policy has no guidance.
    """
    policy = _policy(field)
    if policy.evaluations_per_velocity == 1:
        reason = "the policy samples without classifier-free guidance"
        raise ValueError(f"completion.guidance is off, but {reason}: leave it at same")
    return _with_policy(field, without_guidance(policy))


def _policy(field: VelocityField) -> Policy:
    return field if isinstance(field, Policy) else _around(field).policy


def _with_policy(field: VelocityField, policy: Policy) -> VelocityField:
    """Return the field with the same weights but other attributes of the policy."""
    if isinstance(field, Policy):
        return policy
    inner = copy.copy(_around(field))
    inner.policy = policy
    return inner


def _around(field: VelocityField) -> AdapterOff | FrozenCopy | WeightOverride | TrainedWeights:
    assert isinstance(field, AdapterOff | FrozenCopy | WeightOverride | TrainedWeights)
    return field


def reference_for(policy: Policy) -> VelocityField:
    """Return the policy without its adapter, or a frozen copy if it has none.

    Call it before the first update.
    """
    return AdapterOff(policy) if adapters_of(policy.denoiser) else FrozenCopy(policy)
