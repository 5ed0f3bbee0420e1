"""Define preference data, and the interface of the losses that learn from it.

Axes beside those of `types`: n rows of latents; m pairs, whose winners are rows 0 to m - 1 and
whose losers are rows m to 2m - 1, in the same order.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowalign.functional.transition import Kernel
from flowalign.types.loss import Loss

Label = Literal["labels", "segments", "masks", "advantages", "transitions"]
"""Labels that a dataset may hold beside media and prompts: binary labels, the better medium of each
latent frame, masks of where two media differ, advantages within groups, and the stochastic steps
that the policy took from the states that it visited."""


@dataclass(frozen=True)
class Examples:
    """Holds one minibatch of clean latents with all that a loss may read beside the residuals."""

    latents: Float[Tensor, "n *latent"]
    """Clean latents; for pairs the winners, then the losers."""
    cond: Mapping[str, Tensor]
    """Text conditioning, one row per row of latents."""
    paired: bool
    """True for pairs, False for samples."""
    weight: Float[Tensor, "n"]
    """Loss weight of each row; both rows of a pair have the pair's."""
    desirable: Bool[Tensor, "n"]
    """Binary labels: True for winners of pairs, and for samples without a label."""
    scores: Mapping[str, Float[Tensor, "n"]] = field(default_factory=dict)
    """Reward scores by dimension; NaN where unknown."""
    segments: Float[Tensor, "m F"] | None = None
    """Better row of a pair in each latent frame: 1 the winner, -1 the loser, 0 neither."""
    mask: Float[Tensor, "n *mask"] | None = None
    """Where the rows of a pair differ, at least 0; it broadcasts to the latents."""
    mask_strength: Float[Tensor, "n"] | None = None
    """Factor on what lies within the mask; None: 1."""
    weight_map: Float[Tensor, "n *map"] | None = None
    """Importance of each latent element, mean 1 per row; the errors have it applied already."""
    target_cond: Mapping[str, Tensor] | None = None
    """Conditioning of the teacher whose velocity each row is matched to; None: that of the row."""
    teachers: Sequence[str] = ()
    """Name of the teacher of each row; empty: the only one, if the recipe has any."""
    advantage: Float[Tensor, "n"] | None = None
    """Advantage of each row within its group, clipped; None where rows are not scored."""
    group: Int[Tensor, "n"] | None = None
    """Id of the group of each row, the same on every process: the rows of one request of a step at
    one of its noise levels, one row per sample. Losses compare the rows of a group."""
    users: Sequence[str] = ()
    """Id of the person who judged each row, for personalised policies; empty if none is known."""

    @property
    def required_advantage(self) -> Float[Tensor, "n"]:
        """Return the advantages, for losses that require the label."""
        assert self.advantage is not None, "the loss uses advantages without requiring them"
        return self.advantage

    @property
    def required_group(self) -> Int[Tensor, "n"]:
        """Return the groups, for losses that declare `Requirements.whole_groups`."""
        assert self.group is not None, "the loss compares rows without groups"
        return self.group


@dataclass(frozen=True)
class Transitions:
    """Holds the stochastic steps that the old policy took from the states of the rows.

    The mean of a step is linear in the velocity: means differ by `slope` times what velocities do.
    """

    travelled: Float[Tensor, "n *latent"]
    """Velocity for which the state that was reached is the mean of the step."""
    slope: Float[Tensor, "n"]
    """Derivative of the mean by the velocity, which is negative."""
    std: Float[Tensor, "n"]
    """Standard deviation of the step."""
    dt: Float[Tensor, "n"]
    """Length of the step, sigma_k - sigma_{k+1}."""
    logp_old: Float[Tensor, "n"]
    """log pi_old of the step, averaged over latent elements."""
    kernel: Kernel
    """Transition family that took the steps."""


@dataclass(frozen=True)
class Residuals:
    """Holds prediction - target of the policy and of the reference, in the recipe's space."""

    policy: Float[Tensor, "n *latent"]
    """Residual of the policy, with gradient."""
    reference: Float[Tensor, "n *latent"] | None = None
    """Residual of the reference at the same noise and time, without gradient; None where not
    evaluated."""
    old: Float[Tensor, "n *latent"] | None = None
    """Residual of the old policy at the same noise and time, without gradient; None where not
    evaluated."""
    anchor: Float[Tensor, "n *latent"] | None = None
    """Residual of the average that a loss holds the policy near, likewise."""
    target: Float[Tensor, "n *latent"] | None = None
    """Target in the same space, so that residual + target is a prediction; None in tests of losses
    that do not read it."""
    sigma: Float[Tensor, "n"] | None = None
    """Noise level of each row; None in tests of losses that do not read it."""
    transitions: Transitions | None = None
    """Steps that were taken from the rows, where these are visited states and the steps random."""

    @property
    def required_reference(self) -> Float[Tensor, "n *latent"]:
        """Return the reference's residual, for losses that declare `Requirements.reference`."""
        assert self.reference is not None, "the loss uses a reference without declaring it"
        return self.reference

    @property
    def required_old(self) -> Float[Tensor, "n *latent"]:
        """Return the old policy's residual, for losses that declare `Requirements.old`."""
        assert self.old is not None, "the loss uses an old policy without declaring it"
        return self.old

    @property
    def required_anchor(self) -> Float[Tensor, "n *latent"]:
        """Return the anchor's residual, for losses that declare `Requirements.anchor`."""
        assert self.anchor is not None, "the loss uses an anchor without declaring it"
        return self.anchor

    @property
    def required_transitions(self) -> Transitions:
        """Return the steps from the rows, for losses that require the label."""
        assert self.transitions is not None, "the loss uses transitions without requiring them"
        return self.transitions

    @property
    def required_sigma(self) -> Float[Tensor, "n"]:
        """Return the noise levels, which the loop always gives."""
        assert self.sigma is not None, "the residuals have no noise levels"
        return self.sigma

    @property
    def required_target(self) -> Float[Tensor, "n *latent"]:
        """Return the target, which the loop always gives."""
        assert self.target is not None, "the residuals have no target"
        return self.target


@dataclass(frozen=True)
class LossContext:
    """Holds what a loss may use beside its minibatch."""

    typical_margin: float = 0.0
    """Running mean of |(l_w - r_w) - (l_l - r_l)|; 0 before the first update."""
    gather: Callable[[Tensor], Tensor] = torch.Tensor.detach
    """Concatenates a tensor over processes, without gradient."""


ALONE = LossContext()
"""Context of a single process before its first update."""


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """Declares what a loss needs from the loop and from the data."""

    reference: bool = True
    """Whether the reference is evaluated: one more network evaluation per row."""
    old: bool = False
    """Whether the old policy, `recipe.old`, is evaluated: one more network evaluation per row."""
    anchor: bool = False
    """Whether the average that the policy is held near, `recipe.anchor`, is evaluated, likewise."""
    paired: bool = True
    """Whether rows must be pairs; other losses take the rows of pairs as samples."""
    velocity: bool = False
    """Whether errors are only meaningful in the space `velocity`."""
    whole_batch: bool = False
    """Whether a minibatch must be all of a process's batch, because rows are compared."""
    whole_groups: bool = False
    """Whether all rows of a group must be in one micro-batch, of one process or, because the loss
    gathers once per micro-batch, of several that have equally many micro-batches."""
    shared_noise: bool = False
    """Whether the rows of a group must have the same noise and time."""
    requires: Set[Label] = frozenset()
    """Labels that the loss needs: datasets without them are refused, samples without one are
    dropped."""
    at_start: float | None = None
    """Loss while policy and reference are equal and weights are 1; None: any value."""


class MatchingLoss(ABC):
    """Turns the residuals of a minibatch into a loss. Implementations: `flowalign/losses/`."""

    @property
    @abstractmethod
    def requirements(self) -> Requirements:
        """Return what the loss needs from the loop and from the data."""

    @abstractmethod
    def loss(self, residuals: Residuals, batch: Examples, context: LossContext = ALONE) -> Loss:
        """Return the mean loss over pairs (else over rows), and detached scalars for the log."""
