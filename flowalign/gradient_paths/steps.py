"""Backpropagate through steps of the rollout: chains, single steps, predictions and leaps."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.noise_matching import add_noise
from flowalign.functional.path_gradient import (
    closeness_weight,
    euler_sum,
    predict_clean,
    rescale_factor,
    scale_gradient,
    straight_through,
)
from flowalign.types import GradientPath, Replay, SampleView
from flowalign.utils.ranges import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
)


def require_steps(what: str, wanted: int, num_steps: int) -> None:
    """Raise ValueError if a gradient path asks for more steps than rollouts have."""
    if wanted > num_steps:
        raise ValueError(
            f"recipe.gradient_path {what} asks for {wanted} steps, but rollouts have {num_steps}: "
            f"give at most {num_steps}, or raise recipe.start.num_steps"
        )


def draw_int(low: int, high: int, generator: torch.Generator) -> int:
    """Return a uniform draw from low ... high, both included."""
    return int(torch.randint(low, high + 1, (1,), generator=generator))


def draw_late_biased(
    num_steps: int, count: int, bias: float, generator: torch.Generator
) -> list[int]:
    """Return `count` distinct steps, step i drawn in proportion to (i + 1)^bias, sorted.

    Source: FlowBP-Sparse, arXiv:2606.11075.
    """
    if count >= num_steps:
        return list(range(num_steps))
    weights: Tensor = torch.arange(1, num_steps + 1, dtype=torch.float32) ** bias
    drawn = torch.multinomial(weights / weights.sum(), count, generator=generator)
    return sorted(drawn.tolist())


def draw_evenly_spaced(num_steps: int, count: int, generator: torch.Generator) -> list[int]:
    """Return `count` steps spaced by num_steps // count; the first is drawn uniformly."""
    if count >= num_steps:
        return list(range(num_steps))
    stride = num_steps // count
    first = draw_int(0, num_steps - 1 - (count - 1) * stride, generator)
    return [first + i * stride for i in range(count)]


class Leaps(ABC):
    """Distribution of a pair of steps."""

    fewest: ClassVar[int] = 2
    """Smallest number of rollout steps from which a pair can be drawn."""

    @abstractmethod
    def draw(self, num_steps: int, generator: torch.Generator) -> tuple[int, int]:
        """Return k and j with 0 <= k < j < num_steps."""


@dataclass(frozen=True, kw_only=True)
class UniformLeaps(Leaps):
    """Uniform distribution of two distinct steps. Source: LeapAlign, arXiv:2604.15311."""

    def draw(self, num_steps: int, generator: torch.Generator) -> tuple[int, int]:
        """Return two distinct steps in order."""
        to_end = (torch.randperm(num_steps, generator=generator)[:2] + 1).tolist()
        return num_steps - max(to_end), num_steps - min(to_end)


@dataclass(frozen=True, kw_only=True)
class DRaFT(GradientPath):
    """Backpropagation through the last `last_steps` steps of the sampler.

    If `last_steps` is the number of steps, this is the gradient of the whole sampler. Memory grows
    linearly with `last_steps`.

    Source: DRaFT-K, arXiv:2309.17400.
    """

    last_steps: PositiveInt = 1
    """K, the number of last steps through which the gradient flows. Default: 1, DRaFT-1."""

    @override
    def __call__(self, replay: Replay, generator: torch.Generator) -> Iterator[SampleView]:
        """Yield the sample with the gradient of its last K steps."""
        require_steps(f"DRaFT.last_steps {self.last_steps}", self.last_steps, replay.num_steps)
        yield SampleView(chain_steps(replay, replay.num_steps - self.last_steps))


def chain_steps(replay: Replay, start: int) -> Float[Tensor, "n *latent"]:
    """Return the sample with the gradient of the chain of all steps from `start` on.

    Every state keeps its value from the rollout.
    """
    x, sigmas = replay.state(start), replay.sigmas
    for k in range(start, replay.num_steps):
        step = x + (sigmas[k + 1] - sigmas[k]) * replay.velocity(k, x)
        x = straight_through(replay.state(k + 1), step)
    return x


@dataclass(frozen=True, kw_only=True)
class AlignProp(GradientPath):
    """Backpropagation through the sampler from a random step to the end.

    The step is given as a share of the rollout, because the published values refer to 50 steps.

    Source: AlignProp, arXiv:2310.03739.
    """

    truncation: Literal["normal", "uniform"] = "normal"
    """Distribution of the first step that the gradient reaches."""
    mean: UnitInterval = 0.84
    """Mean of `normal`, as a share of the steps. Default: 42 of 50."""
    std: PositiveFloat = 0.1
    """Standard deviation of `normal`, as a share of the steps. Default: 5 of 50."""

    def __call__(self, replay: Replay, generator: torch.Generator) -> Iterator[SampleView]:
        """Yield the sample with the gradient of a chain of random length."""
        num_steps = replay.num_steps
        if self.truncation == "uniform":
            start = draw_int(0, num_steps - 1, generator)
        else:
            share = self.mean + self.std * float(torch.randn((), generator=generator))
            start = min(max(round(share * num_steps), 0), num_steps - 1)
        yield SampleView(chain_steps(replay, start))


@dataclass(frozen=True, kw_only=True)
class DRaFTLV(GradientPath):
    """Backpropagation through the last step, for the sample and for re-noised copies of it.

    Several gradients per rollout lower the variance.

    Source: DRaFT-LV, arXiv:2309.17400.
    """

    noised_copies: NonNegativeInt = 2
    """Number of copies of each sample that are noised to the last noise level and denoised."""

    @override
    def __call__(self, replay: Replay, generator: torch.Generator) -> Iterator[SampleView]:
        """Yield the sample, then its copies."""
        k = replay.num_steps - 1
        sigma = replay.sigmas[k]
        first = predict_clean(replay.state(k), replay.velocity(k), sigma)
        yield SampleView(first)
        sample = first.detach()
        for i in range(self.noised_copies):
            x = add_noise(sample, replay.noise(i), sigma.expand(len(sample)))
            yield SampleView(predict_clean(x, replay.velocity_at(x, sigma), sigma))


@dataclass(frozen=True, kw_only=True)
class DRTune(GradientPath):
    """Gradient of evenly spaced steps, through the clean latents that a late step predicts.

    The inputs of the network are detached, so no gradient flows from one step through another.

    Source: DRTune, arXiv:2405.00760; defaults of FlowBP's comparison, arXiv:2606.11075.
    """

    train_steps: PositiveInt = 3
    """Number of steps that the gradient reaches; fewer if the drawn end leaves fewer steps."""
    early_stop: UnitInterval = 0.4
    """Share of the last steps from which the predicting step is drawn. 0: the last step."""

    def __call__(self, replay: Replay, generator: torch.Generator) -> Iterator[SampleView]:
        """Yield the clean latents that the last used step predicts."""
        num_steps, sigmas = replay.num_steps, replay.sigmas
        require_steps(f"DRTune.train_steps {self.train_steps}", self.train_steps, num_steps)
        stops = round(num_steps * self.early_stop)
        end = num_steps - (draw_int(1, stops, generator) if stops else 1)
        active = draw_evenly_spaced(end + 1, self.train_steps, generator)
        velocities = {k: replay.velocity(k) for k in active}
        before = {k: v for k, v in velocities.items() if k < end}
        x, v = replay.state(end), velocities.get(end)
        if before:
            x = straight_through(x, euler_sum(before, sigmas))
        yield SampleView(
            predict_clean(x, replay.cached_velocity(end) if v is None else v, sigmas[end])
        )


@dataclass(frozen=True, kw_only=True)
class ReFL(GradientPath):
    """Gradient of the one-step prediction x_k - sigma_k v(x_k) at one late step k.

    Source: ImageReward, arXiv:2304.05977, which draws k from the last 10 of 40 steps. The default
    follows FlowBP's comparison, arXiv:2606.11075, with 25 steps.
    """

    last_steps: PositiveInt = 11
    """Number of last steps from which k is drawn uniformly."""

    def __call__(self, replay: Replay, generator: torch.Generator) -> Iterator[SampleView]:
        """Yield the clean latents that one step predicts."""
        require_steps(f"ReFL.last_steps {self.last_steps}", self.last_steps, replay.num_steps)
        k = replay.num_steps - draw_int(1, self.last_steps, generator)
        yield SampleView(predict_clean(replay.state(k), replay.velocity(k), replay.sigmas[k]))


@dataclass(frozen=True, kw_only=True)
class VADER(GradientPath):
    """Gradient of one sampler step, which later steps pass through unchanged.

    `recipe.frames` chooses the decoded frames; VADER decodes a random one. The paper samples with
    stochastic DDIM, but rollouts here are deterministic.

    Source: VADER, arXiv:2407.08737.
    """

    step: Literal["last", "random"] | NonNegativeInt = "last"
    """Step that the gradient reaches: the last, a random one, or a step index."""

    def __call__(self, replay: Replay, generator: torch.Generator) -> Iterator[SampleView]:
        """Yield the sample with the gradient of one step."""
        last = replay.num_steps - 1
        k = last if self.step == "last" else self.step
        if isinstance(k, str):
            k = draw_int(0, last, generator)
        if k > last:
            raise ValueError(
                f"recipe.gradient_path VADER.step is {k}, but rollouts have {last + 1} steps: give "
                f"at most {last}, or raise recipe.start.num_steps"
            )
        path = euler_sum({k: replay.velocity(k)}, replay.sigmas)
        yield SampleView(straight_through(replay.state(last + 1), path))


@dataclass(frozen=True, kw_only=True)
class LeapAlign(GradientPath):
    """Gradient of two Euler leaps, from step k to step j and from j to the end.

    The gradient through the network's input at j is scaled by `alpha`. A sample gets a lower weight
    the further its leaps deviate from the rollout.

    Source: LeapAlign, arXiv:2604.15311, as implemented in FlowBP's code.
    """

    leaps: Leaps = field(default_factory=UniformLeaps)
    """Distribution of the steps k and j at which the two leaps start."""
    alpha: UnitInterval = 0.3
    """Factor of the gradient through the network's input at j."""
    tau: PositiveFloat = 0.1
    """Lower bound of the distances between leap and rollout in a sample's weight. Default: 0.1."""

    def __call__(self, replay: Replay, generator: torch.Generator) -> Iterator[SampleView]:
        """Yield the sample and its weight."""
        leaps, num_steps = self.leaps, replay.num_steps
        what = f"{type(self).__name__}.leaps {type(leaps).__name__}"
        require_steps(what, leaps.fewest, num_steps)
        k, j = leaps.draw(num_steps, generator)
        x0 = replay.state(num_steps)
        leap = replay.state(k) + self.integral(replay, k, j, replay.velocity(k))
        x_j = straight_through(replay.state(j), leap)
        v_j = replay.velocity(j, scale_gradient(x_j, self.alpha))
        end = x_j + self.integral(replay, j, num_steps, v_j)
        weight = closeness_weight(leap, x_j, end, x0, self.tau)
        yield SampleView(straight_through(x0, end), weight)

    def integral(
        self, replay: Replay, start: int, stop: int, v: Float[Tensor, "n *latent"]
    ) -> Float[Tensor, "n *latent"]:
        """Return the integral of the velocity from start to stop; `v` is the velocity at start."""
        return (replay.sigmas[stop] - replay.sigmas[start]) * v


@dataclass(frozen=True, kw_only=True)
class FlowBPSparse(GradientPath):
    """Gradient of random steps, each weighted as in the Euler sampler.

    Source: FlowBP-Sparse, arXiv:2606.11075. Defaults: its SD3.5-M run; FLUX.1 takes 3 steps, bias
    2 and rescale 1.
    """

    active_steps: PositiveInt = 4
    """Number of steps that the gradient reaches."""
    bias: NonNegativeFloat = 1.0
    """Exponent of the draw: step i has a probability proportional to (i + 1)^bias. 0: uniform."""
    rescale: NonNegativeFloat = 0.5
    """Strength with which gradients are scaled up for the inactive steps. 0: none, 1: fully."""

    def __call__(self, replay: Replay, generator: torch.Generator) -> Iterator[SampleView]:
        """Yield the sample with the gradient of the drawn steps."""
        num_steps, active_steps = replay.num_steps, self.active_steps
        require_steps(f"FlowBPSparse.active_steps {active_steps}", active_steps, num_steps)
        active = draw_late_biased(num_steps, active_steps, self.bias, generator)
        deltas = replay.sigmas.diff()
        factor = float(rescale_factor(deltas[active], deltas, self.rescale))
        path = euler_sum({k: replay.velocity(k) for k in active}, replay.sigmas)
        yield SampleView(straight_through(replay.state(num_steps), scale_gradient(path, factor)))
