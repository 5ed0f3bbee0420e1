"""FlowBP-Bridge and FlowBP-Lagrange: gradients of a few linked steps, and of two leaps."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.path_gradient import (
    euler_sum,
    rescale_factor,
    scale_gradient,
    straight_through,
)
from flowalign.gradient_paths.steps import (
    LeapAlign,
    Leaps,
    UniformLeaps,
    draw_late_biased,
    require_steps,
)
from flowalign.types import GradientPath, Replay, SampleView
from flowalign.utils.ranges import NonNegativeFloat, PositiveFloat, PositiveInt, Range, UnitInterval


@dataclass(frozen=True, kw_only=True)
class FlowBPBridge(GradientPath):
    """Gradient of random steps before j, of step j, and of random steps after j.

    The steps before j also reach the sample through the network's input at j, scaled by `alpha`.

    Source: FlowBP-Bridge, arXiv:2606.11075. Defaults: its SD3.5-M run; FLUX.1 takes bias 2, alpha
    0.1 and rescale 1.
    """

    leaps: Leaps = field(default_factory=UniformLeaps)
    """Distribution of j, which is the second step of the drawn pair."""
    active_steps: Annotated[int, Range(least=2)] = 5
    """Number of steps that the gradient reaches, at least 2: one before j, and j itself. It is
    divided in proportion to the numbers of steps before and after j."""
    bias: NonNegativeFloat = 4.0
    """Exponent of the draw: step i of a part has a probability proportional to (i + 1)^bias."""
    rescale: NonNegativeFloat = 0.0
    """Strength with which gradients are scaled up for the inactive steps. 0: none, 1: fully."""
    alpha: UnitInterval = 0.5
    """Factor of the gradient through the network's input at j."""

    def __call__(self, replay: Replay, generator: torch.Generator) -> Iterator[SampleView]:
        """Yield the sample with the gradient of the drawn steps."""
        num_steps, active_steps = replay.num_steps, self.active_steps
        wanted = max(active_steps, self.leaps.fewest)
        require_steps(f"FlowBPBridge.active_steps {active_steps}", wanted, num_steps)
        _, j = self.leaps.draw(num_steps, generator)
        before, after = self.draw_steps(j, num_steps, generator)
        deltas = replay.sigmas.diff()
        factor = float(rescale_factor(deltas[before + after], deltas, self.rescale))

        path = euler_sum({k: replay.velocity(k) for k in before}, replay.sigmas)
        x_j = straight_through(replay.state(j), scale_gradient(path, factor))
        velocities = {j: replay.velocity(j, scale_gradient(x_j, self.alpha))}
        velocities |= {k: replay.velocity(k) for k in after[1:]}
        rest = scale_gradient(euler_sum(velocities, replay.sigmas), factor)
        yield SampleView(straight_through(replay.state(num_steps), x_j + rest))

    def draw_steps(
        self, j: int, num_steps: int, generator: torch.Generator
    ) -> tuple[list[int], list[int]]:
        """Return the active steps before j, and the active steps from j on."""
        early = divide_steps(self.active_steps, j, num_steps - j)
        before = draw_late_biased(j, early, self.bias, generator)
        others = self.active_steps - early - 1
        later = draw_late_biased(num_steps - j - 1, others, self.bias, generator) if others else []
        return before, [j, *(j + 1 + i for i in later)]


def divide_steps(count: int, before: int, after: int) -> int:
    """Return the number of the `count` active steps that lie in the first part of a rollout.

    Steps are divided in proportion to the lengths `before` and `after`. Each part gets at least
    one step and at most its length.
    """
    share = round(count * before / (before + after))
    return min(max(share, 1, count - after), before, count - 1)


@dataclass(frozen=True, kw_only=True)
class DirichletLeaps(Leaps):
    """Dirichlet distribution of the parts before k, from k to j, and after j.

    Defaults: FlowBP-Lagrange's SD3.5 run. Source: FlowBP, arXiv:2606.11075.
    """

    fewest: ClassVar[int] = 3

    after: PositiveFloat = 2.5
    """Concentration of the part after j."""
    between: PositiveFloat = 6.0
    """Concentration of the part from k to j."""
    before: PositiveFloat = 2.0
    """Concentration of the part before k."""
    latest: PositiveInt | None = 10
    """Largest number of steps from j to the end of the rollout. If the draw exceeds it, k and j
    move later. Null: no limit."""

    def draw(self, num_steps: int, generator: torch.Generator) -> tuple[int, int]:
        """Return k and j from a Dirichlet draw; each of the three parts has at least one step."""
        # Gamma draws consume a varying number of random numbers. A separate generator keeps later
        # draws independent of them. torch.distributions takes no generator.
        seed = int(torch.randint(0, 2**31, (1,), generator=generator))
        own = torch.Generator().manual_seed(seed)
        concentration = torch.tensor([[self.after, self.between, self.before]])
        drawn = torch._standard_gamma(concentration, generator=own)[0]
        lengths = _round_to_sum(drawn / drawn.sum(), num_steps)
        after, between = lengths[0], lengths[1]
        if self.latest is not None:
            after = min(after, max(1, self.latest - 1))
        j = num_steps - 1 - after
        return j - between, j


@dataclass(frozen=True, kw_only=True)
class FlowBPLagrange(LeapAlign):
    """Gradient of two leaps that integrate the velocities of several steps.

    A leap integrates the polynomial through the velocities at its support points. Only the first
    `active_points` of them have a gradient. It deviates less from the rollout than a leap of
    LeapAlign.

    Source: FlowBP-Lagrange, arXiv:2606.11075. Defaults: its SD3.5-M run; FLUX.1 takes rescale 0.5.
    """

    leaps: Leaps = field(default_factory=DirichletLeaps)
    """Distribution of the steps k and j at which the two leaps start."""
    order: PositiveInt = 3
    """Largest number of support points of a leap."""
    active_points: PositiveInt = 2
    """Number of support points that the gradient reaches, counted from the start of the leap."""
    other_scale: UnitInterval = 0.25
    """Factor of the gradient at active points other than the start of the leap."""
    rescale: NonNegativeFloat = 0.0
    """Strength with which gradients are scaled up for the inactive points. 0: none, 1: fully."""
    alpha: UnitInterval = 0.1
    """Factor of the gradient through the network's input at j."""
    tau: PositiveFloat = 0.2
    """Lower bound of the distances between leap and rollout in a sample's weight. Default: 0.2."""

    @override
    def integral(
        self, replay: Replay, start: int, stop: int, v: Float[Tensor, "n *latent"]
    ) -> Float[Tensor, "n *latent"]:
        points, sigmas = support_points(start, stop, self.order), replay.sigmas
        weights = lagrange_weights(sigmas[points], sigmas[start], sigmas[stop])
        active = len(points[: self.active_points])
        factor = float(rescale_factor(weights[:active], weights, self.rescale))
        total = weights[0] * scale_gradient(v, factor)
        for i, k in enumerate(points[1:], 1):
            if i < active:
                value = scale_gradient(replay.velocity(k), factor * self.other_scale)
            else:
                value = replay.cached_velocity(k)
            total = total + weights[i] * value
        return total


def support_points(start: int, stop: int, order: int) -> list[int]:
    """Return at most `order` evenly spaced steps of start ... stop - 1, including both ends.

    With order 1 the only point is `start`.
    """
    count = stop - start
    if count <= order:
        return list(range(start, stop))
    places = torch.linspace(0, count - 1, order).round().long().tolist()
    return [start + place for place in places]


def lagrange_weights(
    points: Float[Tensor, "m"], start: Float[Tensor, ""], stop: Float[Tensor, ""]
) -> Float[Tensor, "m"]:
    """Return the integrals from start to stop of the Lagrange basis polynomials of the points.

    The weighted sum of values at the points integrates every polynomial of degree below m exactly.
    The weights are computed in float64 and returned in the dtype of `points`.
    """
    # A Vandermonde matrix is ill-conditioned: float32 would lose several digits.
    x, m = points.double(), len(points)
    powers = torch.arange(m, dtype=torch.float64, device=x.device)
    moments = (stop.double() ** (powers + 1) - start.double() ** (powers + 1)) / (powers + 1)
    return torch.linalg.solve(x[None] ** powers[:, None], moments).to(points)


def _round_to_sum(shares: torch.Tensor, whole: int) -> list[int]:
    """Return integers of at least 1 in about the given shares, with the sum `whole`."""
    lengths = (shares * whole).round().long()
    lengths[shares.argmax()] += whole - lengths.sum()
    # Rounding may miss the sum or give 0. The largest part absorbs both corrections.
    lengths = lengths.clamp(min=1)
    lengths[lengths.argmax()] += whole - lengths.sum()
    return lengths.tolist()
