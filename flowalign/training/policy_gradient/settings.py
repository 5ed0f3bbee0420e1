"""Define the settings of policy-gradient training that its loop reads."""

from dataclasses import dataclass, field
from typing import Literal

from flowalign.credit.critic import Critic
from flowalign.credit.outcome import Outcome
from flowalign.functional.weight import StepWeight
from flowalign.losses.policy_gradient.grpo import GRPO
from flowalign.rewards.checked import OnFailure
from flowalign.sampling.calibration import Calibration
from flowalign.sampling.settings import Sampling
from flowalign.training import update_checks
from flowalign.training.policy_gradient.chunks import check_chains
from flowalign.training.policy_gradient.measured import MeasuredWeight
from flowalign.training.recipe import Recipe
from flowalign.training.rollouts.advantage_config import AdvantageConfig
from flowalign.training.rollouts.settings import SEVERAL, RolloutSettings, refuse_process
from flowalign.types import CreditEstimator, PolicyLoss
from flowalign.types.completion import Completion
from flowalign.types.ranges import NonNegativeFloat, PositiveInt, require_ranges


@dataclass(frozen=True, kw_only=True)
class PolicyGradientSettings:
    """Rollouts of a file of requests, their credit, and the updates of their transitions.

    `flowalign bench` times the stages of a recipe with these settings, and `flowalign probe`
    compares the gradients of its denoising steps.
    """

    prompts: str
    """Path of the training prompts: a text file, one a line, or JSONL with a field `prompt`, and
    `image`, `images` or `mask` where the policy takes them."""
    prompts_per_step: PositiveInt = 8
    """P, prompts of a step over all processes together."""
    rollout_batch_prompts: PositiveInt | None = None
    """Prompts of a process that are sampled together; rewards of one batch are computed while the
    next is sampled. Null: all of them. Changes time and memory, not the update."""
    sampling: Sampling
    """Sampler of the trajectories of a prompt."""
    calibration: Calibration | None = None
    """Search for the noise level of each step before the first one (DenseGRPO), starting at
    `sampling.eta` of the kernel FlowSDE. Null: none."""
    credit: CreditEstimator = field(default_factory=Outcome)
    """Method that assigns credit to denoising steps, a class of `flowalign.credit`."""
    completion: Completion = field(default_factory=Completion)
    """Completion of intermediate states whose values the credit method requests."""
    critic: Critic | None = None
    """Regression that predicts outcomes from the denoiser's features, for credit that reads its
    predictions. Null: none."""
    advantages: AdvantageConfig = field(default_factory=AdvantageConfig)
    """Comparison of credit: normalisation, weighting of rewards, clipping and selection."""
    algorithm: PolicyLoss = field(default_factory=GRPO)
    """Loss of the transitions: `GRPO` or `StepDPO`."""
    updates_per_step: PositiveInt = 1
    """Number of optimizer updates into which the samples of a step are divided."""
    epochs_per_step: PositiveInt = 1
    """Number of passes over the samples of a step."""
    micro_batch: PositiveInt = 64
    """States per forward and backward pass, with all transitions that leave them; changes memory,
    not the update."""
    step_weight: Literal[StepWeight, "measured"] | list[NonNegativeFloat] | MeasuredWeight = (
        "uniform"
    )
    """Weight of each denoising step in the loss: a rule such as `uniform` or `dt`; a number for
    each step, such as `flowalign probe` finds; or `measured` while training, with settings of its
    own such as `{measured: update, half_life: 40}`."""
    on_failed_reward: OnFailure = "raise"
    """raise: a failed reward ends the run. drop_sample: transitions whose credit is unknown are not
    trained. drop_group: nor are those of the other samples of their prompt at the same step."""
    on_failed_check: update_checks.OnFailure = "raise"
    """raise: a failed check of the first updates stops the run. warn: it is logged."""

    def __post_init__(self) -> None:
        """Reject settings that no run can use, before anything heavy is loaded."""
        require_ranges(self, "recipe")
        self._check_step_weight()
        self.rollouts.check_groups()
        if self.updates_per_step > self.examples_per_step:
            raise ValueError(
                f"recipe.updates_per_step is {self.updates_per_step}, more than the "
                f"{self.examples_per_step} samples of a step that they are made of"
            )
        for iteration in (0, SEVERAL):
            self._check_window(self.rollouts.window(iteration))
        if self.algorithm.pairs and self.updates_per_step > self.prompts_per_step:
            raise ValueError(
                f"recipe.updates_per_step is {self.updates_per_step}, but a loss of pairs divides "
                f"a step by prompts, of which there are {self.prompts_per_step}"
            )

    def _check_window(self, steps: tuple[int, ...]) -> None:
        if not steps:
            raise ValueError(
                f"recipe.sampling.sde_window {type(self.sampling.sde_window).__name__} chooses "
                "no step to train; choose another, such as flowalign.sampling.AllButLast"
            )
        algorithm, rollouts = self.algorithm, self.rollouts
        alone = algorithm.pairs or algorithm.needs_best or algorithm.span is not None
        if rollouts.requirements(steps).credit.process is not None and alone:
            refuse_process("recipe", self.credit)
        if algorithm.chunks is not None or algorithm.span is not None:
            check_chains(rollouts.empty_trajectory(steps))

    def _check_step_weight(self) -> None:
        rule, num_steps = self.step_rule, self.sampling.num_steps
        key = "recipe.step_weight.start" if self.measured else "recipe.step_weight"
        if not isinstance(rule, str) and (len(rule) != num_steps or not any(rule)):
            raise ValueError(
                f"{key} is {rule}; give a number for each of the {num_steps} denoising steps, "
                "not all 0, or the name of a rule"
            )
        if self.measured and self.algorithm.span is not None:
            raise ValueError(
                "recipe.step_weight is measured of single steps, but "
                f"{type(self.algorithm).__name__} trains spans of them: give a rule or numbers, or "
                "choose GRPO"
            )
        if self.measured and self.prompts_per_step < 2 * self.updates_per_step:
            raise ValueError(
                f"recipe.step_weight is measured between two halves of the prompts of an update; "
                f"prompts_per_step is {self.prompts_per_step}, updates_per_step "
                f"{self.updates_per_step}: make prompts_per_step at least twice as large"
            )

    @property
    def rollouts(self) -> RolloutSettings:
        """Return the rollouts of a step, with the states and means that the loss needs."""
        return RolloutSettings(
            sampling=self.sampling,
            credit=self.credit,
            completion=self.completion,
            critic=self.critic,
            advantages=self.advantages,
            prompts_per_step=self.prompts_per_step,
            rollout_batch_prompts=self.rollout_batch_prompts,
            keeps="all" if self.algorithm.chunks == "latent_change" else "trained",
            needs_means=self.algorithm.needs_mean_old,
            clips_process=True,
        )

    @property
    def measured(self) -> MeasuredWeight | None:
        """Return how step weights are measured while training, or None."""
        named = MeasuredWeight() if self.step_weight == "measured" else self.step_weight
        return named if isinstance(named, MeasuredWeight) else None

    @property
    def step_rule(self) -> StepWeight | list[float]:
        """Return the rule or the numbers of step weights; of measured ones, those at the start."""
        measured = self.measured
        if measured:
            return "uniform" if measured.start == "noise" else measured.start
        assert self.step_weight != "measured"
        assert not isinstance(self.step_weight, MeasuredWeight)
        return self.step_weight

    @property
    def updates(self) -> int:
        """Return the number of optimizer updates of one step of the loop."""
        return self.updates_per_step * self.epochs_per_step

    @property
    def examples_per_step(self) -> int:
        """Return the number of trajectories of one step, over all processes."""
        return self.prompts_per_step * self.sampling.samples_per_prompt


def require_policy_gradient(recipe: Recipe) -> PolicyGradientSettings:
    """Return a recipe as one whose denoising steps can be measured.

    Raises:
        ValueError: It has no rollouts of which transitions are updated.
    """
    if not isinstance(recipe, PolicyGradientSettings):
        raise ValueError(
            f"the recipe {type(recipe).__name__} has no rollouts to measure; "
            "flowalign.training.PolicyGradient has"
        )
    return recipe
