"""Define the settings of the matching loop."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from flowalign.functional.noise_matching import Space
from flowalign.losses.matching.pairs import DPO
from flowalign.training.engine import OnFailedCheck
from flowalign.training.matching.reference_models import (
    Average,
    AverageName,
    ColdStart,
    FrozenBase,
    ReferenceModel,
    Teacher,
)
from flowalign.training.matching.states import ForwardNoise, LogitNormal, StateSource, Times
from flowalign.types import MatchingLoss, Policy
from flowalign.utils.errors import require_default
from flowalign.utils.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt, require_ranges

STEP_FIELD = "step"
"""Name of the learner's velocity field for the step to the matched states."""


@dataclass(frozen=True, kw_only=True)
class MatchingSettings:
    """Settings of the loss, the states, the references and the updates."""

    loss: MatchingLoss = field(default_factory=DPO)
    """Loss of the residuals, a class from `flowalign.losses`."""
    reference: ReferenceModel = field(default_factory=FrozenBase)
    """Reference model. It is only evaluated if the loss needs it or `kl` is above 0."""
    old: Average | None = None
    """Old policy: an average of the policy for losses such as DiffusionNFT, which can also generate
    scored groups. Null: none."""
    anchor: Average | None = None
    """Average of the policy that losses such as AWM keep it close to. Null: none."""
    behaviour: Average | None = None
    """Average of the policy that only generates scored groups, as in CRD. Null: none."""
    teachers: Mapping[str, Teacher] = field(default_factory=dict)
    """Trained weights by name; their velocities are the targets. With several teachers, the data
    names the teacher of each request. Empty: the target is noise - latents."""
    cold_start: ColdStart = "policy"
    """Initial weights. policy: the policy's own. average: the mean of the teachers' weights. merge:
    the merged adapter updates of the teachers (Flow-OPD)."""
    states: StateSource = field(default_factory=ForwardNoise)
    """Source of the states at which velocities are matched: `ForwardNoise`, `GuidedStep` (SOAR) or
    `VisitedStates`."""
    times: Times = field(default_factory=LogitNormal)
    """Distribution of the noise levels. The two rows of a pair share time and noise."""
    times_per_sample: PositiveInt = 1
    """Number of noise levels per pair or sample in a pass, with independent noise. All levels are
    in the same update."""
    space: Space = "velocity"
    """Space of the squared errors; `noise` is the prediction space of SD1.5 and SDXL."""
    sft: NonNegativeFloat = 0.0
    """Weight of an additional SFT term, the mean error of winners or desirable samples. 0: none."""
    kl: NonNegativeFloat = 0.0
    """Weight of the mean squared difference between the velocities of policy and reference. 0:
    none."""
    updates_per_step: PositiveInt = 1
    """Number of optimizer updates per pass over the examples of a step."""
    epochs_per_step: PositiveInt = 1
    """Number of passes over the examples of a step."""
    micro_batch: PositiveInt = 32
    """Number of pairs or samples per forward and backward pass. It changes memory, not the
    update."""
    displacement_patience: NonNegativeInt = 25
    """Number of consecutive updates with winners matched worse than by the reference, after which
    the run reports likelihood displacement. 0: never."""
    on_failed_check: OnFailedCheck = "raise"
    """Action after a failed check of the first updates. raise: the run ends. warn: a message is
    logged."""

    def __post_init__(self) -> None:
        """Reject invalid settings before any model is loaded."""
        require_ranges(self, "recipe")
        if self.loss.velocity:
            reason = f"{type(self.loss).__name__} is defined on velocities"
            require_default(self, "recipe", reason, "space")
        if self.cold_start != "policy" and not self.teachers:
            raise ValueError(
                f"recipe.cold_start is {self.cold_start}, but recipe.teachers is empty: name the "
                "teachers, or set it to policy"
            )
        if taken := sorted({*self.teachers} & {*get_args(AverageName), STEP_FIELD}):
            remedy = "which is a reserved name: rename the teacher, for example after its reward"
            raise ValueError(f"recipe.teachers names {taken[0]}, {remedy}")

    @property
    def updates(self) -> int:
        """Return the number of optimizer updates per training step."""
        return self.updates_per_step * self.epochs_per_step

    @property
    def needs_reference(self) -> bool:
        """Return whether the reference is evaluated."""
        return "reference" in self.loss.needs or self.kl > 0

    @property
    def averages(self) -> dict[AverageName, Average]:
        """Return the averages of the policy other than the reference, by name."""
        named: dict[AverageName, Average | None] = {
            "old": self.old,
            "anchor": self.anchor,
            "behaviour": self.behaviour,
        }
        return {name: average for name, average in named.items() if average is not None}

    def evaluations_beside(self, policy: Policy) -> dict[str, int]:
        """Return the network evaluations without gradient per row and noise level, by purpose."""
        needs = self.loss.needs
        rows, scale = self.states.rows, self.states.scale(policy)
        return {
            "reference": rows * self.needs_reference * self.reference.count_evaluations(policy),
            "old": rows * ("old" in needs),
            "anchor": rows * ("anchor" in needs),
            "teachers": rows * bool(self.teachers),
            "steps to states": 0 if scale is None else 1 + (scale > 1),
        }

    def check_averages(self, sampled: str) -> None:
        """Raise ValueError if an average is missing, or is used by neither the loss nor sampling.

        `sampled` is the name of the weights that sample the data, such as `policy`.
        """
        loss = type(self.loss).__name__
        for name in get_args(AverageName)[1:]:
            needed = name in self.loss.needs
            if (needed or sampled == name) and name not in self.averages:
                who = f"recipe.loss {loss} compares the policy" if needed else "recipe.data samples"
                raise ValueError(
                    f"{who} {'with' if needed else 'from'} weights named {name}, and recipe.{name} "
                    "is null: give them a schedule, such as {decay: 0.0} for a copy per step"
                )
            if not (needed or sampled == name):
                reason = (
                    f"recipe.loss {loss} reads no {name}, and recipe.data samples from {sampled}"
                )
                require_default(self, "recipe", reason, name)

    def check_whole_batch(self, num_examples: int) -> None:
        """Raise ValueError if a minibatch is smaller than the batch that the loss compares."""
        if num_examples * self.times_per_sample > self.micro_batch * self.updates_per_step:
            raise ValueError(
                f"recipe.micro_batch is {self.micro_batch}, but {type(self.loss).__name__} "
                f"compares all of the {num_examples} pairs or samples of a step: set it to at "
                "least this number"
            )
