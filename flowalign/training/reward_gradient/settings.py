"""Define the settings of training on reward gradients that its loop reads."""

from dataclasses import dataclass, field

from flowalign.losses.reward_gradient import Maximise, RewardLoss
from flowalign.rewards.checked import OnFailure
from flowalign.rewards.control_words import ControlWords
from flowalign.training import update_checks
from flowalign.training.reward_gradient.dry_run import Cost, cost
from flowalign.training.reward_gradient.frame_choice import Frames
from flowalign.training.reward_gradient.regulariser import Regulariser
from flowalign.training.reward_gradient.start import FromRollouts, Start
from flowalign.types import GradientPath
from flowalign.types.ranges import NonNegativeFloat, PositiveInt, require_ranges


@dataclass(frozen=True, kw_only=True)
class RewardGradientSettings:
    """Configures what to sample, how it is connected to the policy, and what is optimised."""

    gradient_path: GradientPath
    """Steps that the gradient reaches, and on which path: a class of `flowalign.gradient_paths`."""
    start: Start = field(default_factory=FromRollouts)
    """Where samples come from: `FromRollouts` or `FromPhotos`."""
    loss: RewardLoss = field(default_factory=Maximise)
    """Loss of the weighted reward: `Maximise`, `Margin` or `Distance`."""
    relative: ControlWords | None = None
    """Control words under which the same media are compared (SRPO). Null: prompts as they are."""
    detach_unconditional: bool = False
    """Whether the unconditional branch of a guided velocity has no gradient, which costs half."""
    frames: Frames = "all"
    """Frames of a clip that are scored. random: one of them (VADER)."""
    kl: NonNegativeFloat = 0.0
    """Weight of the mean squared difference from the reference's velocity where the policy is
    evaluated with gradient."""
    regulariser: Regulariser | None = None
    """Loss of stored media that is added to every update, such as SFT. Null: none."""
    prompts_per_step: PositiveInt = 64
    """P, prompts of a step over all processes together."""
    micro_batch: PositiveInt = 8
    """Samples per pass with gradient through policy, decoder and rewards; changes memory, not the
    update."""
    on_failed_reward: OnFailure = "raise"
    """raise: a failed reward ends the run. drop_sample: the sample has no gradient; the mean stays
    over all."""
    on_failed_check: update_checks.OnFailure = "raise"
    """raise: a failed check of the first updates stops the run. warn: it is logged."""

    def __post_init__(self) -> None:
        """Reject settings that no run can use, before anything heavy is loaded."""
        require_ranges(self, "recipe")
        if self.on_failed_reward == "drop_group":
            raise ValueError(
                "recipe.on_failed_reward is drop_group, but samples are not compared here: choose "
                "raise or drop_sample"
            )
        if self.cost.inverts and self.relative is None:
            raise ValueError(
                f"recipe.gradient_path {type(self.gradient_path).__name__} also adds noise, for "
                "which control words swap: set recipe.relative, or directions to denoise"
            )

    @property
    def regularised(self) -> Regulariser | None:
        """Return the regulariser, unless its weight is 0."""
        return self.regulariser if self.regulariser and self.regulariser.weight else None

    @property
    def cost(self) -> Cost:
        """Return what the gradient path costs for one sample.

        Raises:
            ValueError: The gradient path asks for more than the start gives.
        """
        return cost(self.gradient_path, self.start.num_steps)

    @property
    def examples_per_step(self) -> int:
        """Return the number of samples of one step, over all processes."""
        return self.prompts_per_step * self.start.samples_per_prompt
