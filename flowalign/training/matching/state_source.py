"""Choose the states at which velocities are matched: on the way of the data, off it, or visited."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.noise_matching import add_noise
from flowalign.functional.self_correction import (
    level_after,
    point_weights,
    renoise,
    velocity_to_data,
)
from flowalign.functional.transition import per_row
from flowalign.training.matching.example_parts import take
from flowalign.training.reference import Guided, conditional
from flowalign.types import Examples, Policy, Transitions, VelocityField
from flowalign.types.ranges import (
    DenoisingSteps,
    Guidance,
    PositiveFloat,
    PositiveInt,
    require_ranges,
)

_SCHEDULE = 1000
"""Steps of the schedule on which the length of a step is measured."""


@dataclass(frozen=True)
class NoisedExamples:
    """Holds examples with the noise and the times that they are noised by."""

    examples: Examples
    """Clean latents and their labels."""
    noise: Float[Tensor, "m *latent"]
    """Noise of each pair, or sample."""
    sigma: Float[Tensor, "m"]
    """Time of each pair, or sample."""
    uniform: Float[Tensor, "m K"] | None = None
    """Numbers in [0, 1), as many of each sample as the states draw; None if these draw none."""
    transitions: Transitions | None = None
    """Steps that were taken from visited states, if they were random."""

    def rows(self) -> tuple[Float[Tensor, "n *latent"], Float[Tensor, "n"]]:
        """Return noise and sigma of every row; both rows of a pair have the pair's."""
        copies = 2 if self.examples.paired else 1
        return torch.cat([self.noise] * copies), torch.cat([self.sigma] * copies)


@dataclass(frozen=True)
class MatchedStates:
    """Holds the states at which velocities are matched, with the examples that they belong to."""

    examples: Examples
    """Labels and weights of each row."""
    x: Float[Tensor, "n *latent"]
    """State of each row."""
    sigma: Float[Tensor, "n"]
    """Noise level of each row."""
    target: Float[Tensor, "n *latent"]
    """Velocity from the data of each row to its state, the target where there is no teacher."""
    transitions: Transitions | None = None
    """Steps that were taken from the rows, if they are visited states and the steps random."""


class StateSource(ABC):
    """Chooses the states of noised examples at which velocities are matched."""

    @property
    def rows(self) -> int:
        """Return the rows that are matched for one row of a noise level."""
        return 1

    @property
    def visited(self) -> bool:
        """Return whether the states are those of the trajectories that led to the examples."""
        return False

    @property
    def draws(self) -> int:
        """Return how many random numbers the states of a noise level take."""
        return 0

    @property
    def guidance(self) -> float | None:
        """Return the guidance of the step that the policy takes to the states; None: it takes none.

        With it the step costs two evaluations per noise level, and one at guidance 1.
        """
        return None

    def field(self, policy: Policy) -> VelocityField | None:
        """Return the field of that step; raise ValueError for a policy without guidance."""
        if self.guidance is None:
            return None
        return conditional(policy) if self.guidance == 1 else Guided(policy, self.guidance)

    @abstractmethod
    def build(
        self, part: NoisedExamples, policy: Policy, field: VelocityField | None
    ) -> MatchedStates:
        """Return the states of noised examples; `field` is what the method of that name returns."""


@dataclass(frozen=True)
class ForwardNoise(StateSource):
    """Matches at latents that are noised forward, as flow matching and its losses do."""

    @override
    def build(
        self, part: NoisedExamples, policy: Policy, field: VelocityField | None
    ) -> MatchedStates:
        noise, sigma = part.rows()
        latents = part.examples.latents
        return MatchedStates(
            part.examples, add_noise(latents, noise, sigma), sigma, noise - latents
        )


@dataclass(frozen=True)
class VisitedStates(StateSource):
    """Matches at states that the policy itself visited while it sampled.

    They come from data that are trajectories, `OnPolicyStates`, and `recipe.times` chooses among
    them. A visited state is the sample that it led to, noised by a noise of its own.
    """

    @property
    @override
    def visited(self) -> bool:
        return True

    @override
    def build(
        self, part: NoisedExamples, policy: Policy, field: VelocityField | None
    ) -> MatchedStates:
        return replace(ForwardNoise().build(part, policy, field), transitions=part.transitions)


@dataclass(frozen=True, kw_only=True)
class GuidedStep(StateSource):
    """Matches at noised latents, and at states that one step of the policy leads to (SOAR).

    From the noised latent the policy takes one guided Euler step, without gradient. The state that
    it reaches is noised again to several levels, by the same noise, and there the policy has to
    learn the velocity to the data. The defaults are the published ones.

    Source: SOAR, arXiv:2604.12617, and code of Tencent-Hunyuan/HY-SOAR with a single path. There
    levels of states are rounded to the scheduler's grid for the network, here they are not.
    """

    count: PositiveInt = 6
    """States of each noised latent."""
    guidance_scale: Guidance = 4.5
    """Classifier-free guidance of the step; 1: none."""
    num_steps: DenoisingSteps = 40
    """Steps of the sampler of which one is taken."""
    weight: PositiveFloat = 1.0
    """Weight of the error at a point, where that at a noised latent has 1."""

    def __post_init__(self) -> None:
        """Reject numbers outside their ranges."""
        require_ranges(self, "recipe.states")

    @property
    @override
    def rows(self) -> int:
        return 1 + self.count

    @property
    @override
    def draws(self) -> int:
        return self.count

    @property
    @override
    def guidance(self) -> float:
        return self.guidance_scale

    @override
    def build(
        self, part: NoisedExamples, policy: Policy, field: VelocityField | None
    ) -> MatchedStates:
        """Return the noised latents, then the first point of each, then the second, and so on."""
        assert field is not None, "the field of the step was not opened"
        assert part.uniform is not None, "the levels of the states were not drawn"
        examples, noise, sigma = part.examples, part.noise, part.sigma
        x = add_noise(examples.latents, noise, sigma)
        after = level_after(policy.schedule(_SCHEDULE).to(sigma), sigma, 1 / self.num_steps)
        with torch.no_grad():
            reached = x + per_row(after - sigma, x) * field.velocity(x, sigma, examples.cond)
        levels = [after + (1 - after) * drawn for drawn in part.uniform.to(sigma).unbind(1)]
        states = [renoise(reached, noise, after, level) for level in levels]
        index = torch.arange(len(sigma)).repeat(self.rows)
        rows = take(examples, index)
        own, each = point_weights(self.count, self.weight)
        scale = torch.full_like(rows.weight, each)
        scale[: len(sigma)] = own
        targets = [
            velocity_to_data(p, examples.latents, s) for p, s in zip(states, levels, strict=True)
        ]
        return MatchedStates(
            replace(rows, weight=rows.weight * scale),
            torch.cat([x, *states]),
            torch.cat([sigma, *levels]),
            torch.cat([noise - examples.latents, *targets]),
        )
