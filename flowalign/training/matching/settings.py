"""The settings of matching training that the functions of its loop read."""

from dataclasses import dataclass, field

from flowalign.functional.matching import Space
from flowalign.losses.matching.dpo import DPO
from flowalign.training.checks import OnFailure
from flowalign.training.matching.references import FrozenBase, Reference, Teacher
from flowalign.training.matching.times import LogitNormal, Times
from flowalign.types import MatchingLoss


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is matched, with what loss, against what reference."""

    loss: MatchingLoss = field(default_factory=DPO)
    reference: Reference = field(default_factory=FrozenBase)
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
    displacement_patience: int = 25
    """Updates in a row in which winners are matched worse than by the reference, after which the
    run reports likelihood displacement. 0 never reports it."""
    on_failed_check: OnFailure = "raise"

    def __post_init__(self) -> None:
        """Reject what no run can use, before anything heavy is loaded."""
        for name in ("updates_per_step", "epochs_per_step", "micro_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"recipe.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("sft", "kl", "displacement_patience"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"recipe.{name} is {getattr(self, name)}; it must be at least 0")

    @property
    def updates(self) -> int:
        """Optimizer updates of one step of the loop."""
        return self.updates_per_step * self.epochs_per_step

    @property
    def needs_reference(self) -> bool:
        """Whether the reference is evaluated."""
        return self.loss.requirements.reference or self.kl > 0

    def check_whole_batch(self, num_examples: int) -> None:
        """ValueError where a loss that compares all rows of a batch would see only a part."""
        if num_examples > self.micro_batch * self.updates_per_step:
            raise ValueError(
                f"recipe.micro_batch is {self.micro_batch}, but {type(self.loss).__name__} "
                f"compares all of the {num_examples} pairs or samples of a step: make it as large"
            )
