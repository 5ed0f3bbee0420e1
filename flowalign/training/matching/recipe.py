"""One recipe of preference training: what is matched, with what loss, against what reference."""

from dataclasses import dataclass, field

from flowalign.functional.matching import Space
from flowalign.losses.matching.dpo import DPO
from flowalign.training.matching.references import Base, Reference, Teacher
from flowalign.training.matching.times import LogitNormal, Times
from flowalign.training.policy_gradient import checks as gates
from flowalign.types import MatchingLoss


@dataclass(frozen=True, kw_only=True)
class Preference:
    """Everything about a run but its model, its data and its optimizer."""

    loss: MatchingLoss = field(default_factory=DPO)
    reference: Reference = field(default_factory=Base)
    expert: Teacher | None = None
    """Weights whose velocities data of kind attributes are matched to (target-DPO)."""
    times: Times = field(default_factory=LogitNormal)
    """Noise levels at which latents are matched; the two of a pair share time and noise."""
    space: Space = "velocity"
    """In which squared errors are taken; noise is that of SD1.5 and SDXL."""
    sft: float = 0.0
    """Weight of the mean error of winners (of samples, the desirable ones), added to the loss."""
    kl: float = 0.0
    """Weight of the mean square between the velocities of policy and reference."""
    updates_per_step: int = 1
    """Into how many optimizer updates the examples of a step are divided."""
    epochs_per_step: int = 1
    """How often the examples of a step are gone through."""
    micro_batch: int = 32
    """Pairs or samples per forward and backward pass; changes memory, not the update."""
    alarm: int = 25
    """After so many updates in a row in which winners are matched worse than by the reference, the
    run says so: likelihood displacement. 0: never."""
    on_failed_check: gates.OnFailure = "raise"

    def __post_init__(self) -> None:
        """Reject what no run can use, before anything heavy is loaded."""
        for name in ("updates_per_step", "epochs_per_step", "micro_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"recipe.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("sft", "kl", "alarm"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"recipe.{name} is {getattr(self, name)}; it must be at least 0")

    @property
    def updates(self) -> int:
        """Optimizer updates of one step."""
        return self.updates_per_step * self.epochs_per_step

    @property
    def needs_reference(self) -> bool:
        """Whether the reference is evaluated."""
        return self.loss.traits.reference or self.kl > 0

    def check_whole_batch(self, units: int) -> None:
        """ValueError where a loss that compares all rows of a batch would see only a part."""
        if units > self.micro_batch * self.updates_per_step:
            raise ValueError(
                f"recipe.micro_batch is {self.micro_batch}, but {type(self.loss).__name__} "
                f"compares all of the {units} pairs or samples of a step: make it as large"
            )
