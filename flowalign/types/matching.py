"""Define preference data and the interface of the losses that train on it.

Axes, in addition to the axes of `types`: n rows of latents; m pairs. The winners of the pairs are
rows 0 to m - 1, the losers rows m to 2m - 1 in the same order.
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
from flowalign.types.ranges import require_ranges

Label = Literal[
    "labels",
    "segments",
    "masks",
    "advantages",
    "transitions",
    "targets",
    "places",
    "contrasts",
    "modalities",
]
"""Labels that a dataset may hold in addition to media and prompts.

labels: binary labels. segments: better row of a pair in each latent frame. masks: regions where
the rows of a pair differ. advantages: advantages within groups. transitions: stochastic steps that
the policy took from the states that it visited. targets: displacements of the clean latents up and
down a reward. places: advantages of latent positions. contrasts: directions from the other sample
of a group of two. modalities: advantages of the parts of a state, such as video and audio.
"""


@dataclass(frozen=True)
class Examples:
    """Minibatch of clean latents, with everything a loss may read except the residuals."""

    latents: Float[Tensor, "n *latent"]
    """Clean latents; for pairs the winners, then the losers."""
    cond: Mapping[str, Tensor]
    """Text conditioning, one row per row of latents."""
    paired: bool
    """True for pairs, False for samples."""
    weight: Float[Tensor, "n"]
    """Loss weight of each row; both rows of a pair have the weight of the pair."""
    desirable: Bool[Tensor, "n"]
    """Binary labels; True for winners of pairs and for samples without a label."""
    scores: Mapping[str, Float[Tensor, "n"]] = field(default_factory=dict)
    """Reward scores by dimension; NaN where unknown."""
    segments: Float[Tensor, "m F"] | None = None
    """Better row of a pair in each latent frame: 1 the winner, -1 the loser, 0 neither."""
    mask: Float[Tensor, "n *mask"] | None = None
    """Weights >= 0 of the region where the rows of a pair differ; broadcasts to the latents."""
    mask_strength: Float[Tensor, "n"] | None = None
    """Factor on the elements inside the mask; None: 1."""
    weight_map: Float[Tensor, "n *map"] | None = None
    """Importance of each latent element, mean 1 per row; the residuals already include it."""
    target_cond: Mapping[str, Tensor] | None = None
    """Conditioning under which the teacher predicts each row's target; None: same as `cond`."""
    teachers: Sequence[str] = ()
    """Name of the teacher of each row; empty: the recipe's only teacher, if it has one."""
    advantage: Float[Tensor, "n"] | None = None
    """Clipped advantage of each row within its group; None if rows are not scored."""
    group: Int[Tensor, "n"] | None = None
    """Group id of each row, the same on every process. A group has the rows of one request in one
    step at one noise level, one row per sample. Losses compare the rows of a group."""
    users: Sequence[str] = ()
    """Id of the annotator of each row, for personalised policies; empty if none is known."""
    places: Float[Tensor, "n 1 *grid"] | None = None
    """Advantage of each row at each latent position; None: `advantage` at all positions."""
    ascent: Float[Tensor, "n *latent"] | None = None
    """Displacement of each clean latent to its target with a higher reward; None if not known."""
    descent: Float[Tensor, "n *latent"] | None = None
    """Displacement of each clean latent to its target with a lower reward; None if not known."""

    contrast: Float[Tensor, "n *latent"] | None = None
    """Normalised direction from the other sample of a group of two to this one; None if not
    known."""
    modality_advantages: Float[Tensor, "n P"] | None = None
    """Advantage of each part of each row; None if all parts have `advantage`."""
    modality_sizes: Sequence[int] = ()
    """Number of elements of each part of a flat latent; empty if latents have no parts."""

    @property
    def required_contrast(self) -> Float[Tensor, "n *latent"]:
        """Return the directions, for losses that require contrasts."""
        assert self.contrast is not None, "the loss uses contrasts without requiring them"
        return self.contrast

    @property
    def required_modalities(self) -> Float[Tensor, "n P"]:
        """Return the advantages of parts, for losses that require modalities."""
        assert self.modality_advantages is not None, "the loss uses parts without requiring them"
        return self.modality_advantages

    @property
    def required_advantage(self) -> Float[Tensor, "n"]:
        """Return the advantages, for losses that require the label."""
        assert self.advantage is not None, "the loss uses advantages without requiring them"
        return self.advantage

    @property
    def required_targets(self) -> tuple[Float[Tensor, "n *latent"], Float[Tensor, "n *latent"]]:
        """Return the displacements up and down the reward, for losses that require targets."""
        assert self.ascent is not None, "the loss uses targets without requiring them"
        assert self.descent is not None, "the loss uses targets without requiring them"
        return self.ascent, self.descent

    @property
    def required_group(self) -> Int[Tensor, "n"]:
        """Return the groups, for losses that declare `Requirements.whole_groups`."""
        assert self.group is not None, "the loss compares rows without groups"
        return self.group


@dataclass(frozen=True)
class Transitions:
    """Stochastic steps that the old policy took from the states of the rows.

    The mean of a step is linear in the velocity: mean_a - mean_b = slope * (v_a - v_b).
    """

    travelled: Float[Tensor, "n *latent"]
    """Velocity for which the mean of the step equals the state that was reached."""
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
    """Prediction minus target of the policy and of the reference, in the recipe's space."""

    policy: Float[Tensor, "n *latent"]
    """Residual of the policy, with gradient."""
    reference: Float[Tensor, "n *latent"] | None = None
    """Residual of the reference at the same noise and time, without gradient; None if not
    evaluated."""
    old: Float[Tensor, "n *latent"] | None = None
    """Residual of the old policy at the same noise and time, without gradient; None if not
    evaluated."""
    anchor: Float[Tensor, "n *latent"] | None = None
    """Residual of the weight average that the loss keeps the policy close to, at the same noise and
    time, without gradient; None if not evaluated."""
    target: Float[Tensor, "n *latent"] | None = None
    """Target in the same space, so residual + target is the prediction; None only in tests of
    losses that do not read it."""
    sigma: Float[Tensor, "n"] | None = None
    """Noise level of each row; None only in tests of losses that do not read it."""
    transitions: Transitions | None = None
    """Stochastic steps taken from the rows; None unless rows are visited states of an SDE."""

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
        """Return the noise levels, which the loop always provides."""
        assert self.sigma is not None, "the residuals have no noise levels"
        return self.sigma

    @property
    def required_target(self) -> Float[Tensor, "n *latent"]:
        """Return the target, which the loop always provides."""
        assert self.target is not None, "the residuals have no target"
        return self.target


@dataclass(frozen=True)
class LossContext:
    """Inputs of a loss in addition to its minibatch."""

    typical_margin: float = 0.0
    """Running mean of |(l_w - r_w) - (l_l - r_l)|; 0 before the first update."""
    gather: Callable[[Tensor], Tensor] = torch.Tensor.detach
    """Function that concatenates a tensor over processes, without gradient."""


ALONE = LossContext()
"""Context of a single process before its first update."""


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """Requirements of a loss on the loop and on the data."""

    reference: bool = True
    """Whether the reference is evaluated, at one more network evaluation per row."""
    old: bool = False
    """Whether the old policy, `recipe.old`, is evaluated, at one more evaluation per row."""
    anchor: bool = False
    """Whether the weight average `recipe.anchor` is evaluated, at one more evaluation per row."""
    paired: bool = True
    """Whether rows must be pairs; if False, the rows of pairs are used as samples."""
    velocity: bool = False
    """Whether errors are only meaningful in the space `velocity`."""
    whole_batch: bool = False
    """Whether the minibatch must be the whole batch of a process, because rows are compared."""
    whole_groups: bool = False
    """Whether all rows of a group must be in the same micro-batch. The loss gathers once per
    micro-batch, so a group may span processes with equal numbers of micro-batches."""
    uses_places: bool = False
    """Whether the loss uses advantages of latent positions."""
    shared_noise: bool = False
    """Whether the rows of whole groups must also have the same noise."""
    requires: Set[Label] = frozenset()
    """Labels that the loss needs. Datasets without them are rejected, samples without one are
    dropped."""
    at_start: float | None = None
    """Loss while the policy equals the reference and all weights are 1; None: any value."""


class MatchingLoss(ABC):
    """Loss on the residuals of a minibatch. Implementations: `flowalign/losses/`."""

    def __post_init__(self) -> None:
        """Reject settings outside the ranges of their types, if the loss is a dataclass."""
        require_ranges(self, type(self).__name__)

    @property
    @abstractmethod
    def requirements(self) -> Requirements:
        """Return the requirements of the loss on the loop and on the data."""

    @abstractmethod
    def loss(self, residuals: Residuals, batch: Examples, context: LossContext = ALONE) -> Loss:
        """Return the mean loss over pairs, or over rows if unpaired, and scalars for the log."""
