"""Define the settings of the policy-gradient loop."""

from dataclasses import dataclass, field
from typing import Literal

from flowalign.credit.chain import Outcome
from flowalign.functional.surrogate import StepWeight
from flowalign.losses.policy_gradient.grpo import GRPO
from flowalign.rewards.checked import OnFailure
from flowalign.sampling.calibration import Calibration
from flowalign.training.engine import OnFailedCheck
from flowalign.training.matching.regulariser import OptionalRegulariser
from flowalign.training.policy_gradient.batches import check_chains
from flowalign.training.policy_gradient.gardo import ResetReference, UncertaintyGate
from flowalign.training.policy_gradient.step_gradients import MeasuredWeight
from flowalign.training.recipe import Recipe, TrainingPrompts
from flowalign.training.rollouts.advantages import RewardMap
from flowalign.training.rollouts.rollout_settings import (
    SEVERAL,
    RolloutFields,
    RolloutSettings,
    refuse_process,
)
from flowalign.types import CreditEstimator, PolicyLoss
from flowalign.utils.errors import require_default
from flowalign.utils.ranges import NonNegativeFloat, PositiveInt, require_ranges


@dataclass(frozen=True, kw_only=True)
class PolicyGradientSettings(TrainingPrompts, OptionalRegulariser, RolloutFields):
    """Settings of the rollouts, their credit, and the updates.

    `flowalign bench` times the stages of a recipe with these settings, and `flowalign probe`
    compares the gradients of its denoising steps.
    """

    calibration: Calibration | None = None
    """Search for the noise level of each denoising step before training (DenseGRPO). It starts at
    `sampling.eta` of the kernel FlowSDE. Null: none."""
    credit: CreditEstimator = field(default_factory=Outcome)
    """Method that assigns credit to denoising steps, a class from `flowalign.credit`."""
    kl_gate: UncertaintyGate | None = None
    """Samples with a KL, if `algorithm` is GRPO with `kl_coef` (GARDO). Null: all samples."""
    reference: ResetReference | None = None
    """Schedule by which the policy replaces the reference of the KL (GARDO). Null: never."""
    spatial: RewardMap | None = None
    """Distribution of advantages over latent positions, for `GRPO`. Null: equal advantages."""
    algorithm: PolicyLoss = field(default_factory=GRPO)
    """Loss of the transitions: `GRPO` or `StepDPO`."""
    updates_per_step: PositiveInt = 1
    """Number of optimizer updates per pass over the samples of a step."""
    epochs_per_step: PositiveInt = 1
    """Number of passes over the samples of a step."""
    micro_batch: PositiveInt = 64
    """Number of states per forward and backward pass, with all their outgoing transitions. It
    changes memory, not the update."""
    keep_graphs: bool = False
    """Whether the update uses the graphs of the rollout's own network calls instead of evaluating
    their states again. The gradient has the same bits; the memory of all trained steps is kept from
    the rollout to the update. Source: Retain of LeanGRPO, arXiv:2609.03528."""
    step_weight: Literal[StepWeight, "measured"] | list[NonNegativeFloat] | MeasuredWeight = (
        "uniform"
    )
    """Weight of each denoising step in the loss: a rule such as `uniform` or `dt`; a number for
    each step, for example from `flowalign probe`; or `measured` during training, with optional
    settings such as `{measured: update, half_life: 40}`."""
    on_failed_reward: OnFailure = "raise"
    """Action after a failed reward. raise: the run ends. drop_sample: transitions with unknown
    credit are not trained. drop_group: transitions of the other samples of the prompt at the same
    step are not trained either."""
    on_failed_check: OnFailedCheck = "raise"
    """Action after a failed check of the first updates. raise: the run ends. warn: a message is
    logged."""

    def __post_init__(self) -> None:
        """Reject invalid settings before any model is loaded."""
        require_ranges(self, "recipe")
        self._check_step_weight()
        self.rollouts.check_groups()
        if self.updates_per_step > self.examples_per_step:
            raise ValueError(
                f"recipe.updates_per_step is {self.updates_per_step}, more than the "
                f"{self.examples_per_step} samples of a step"
            )
        if not self.algorithm.uses_places:
            reason = "it needs GRPO without chunk_sizes and with PPOClip, LogHinge or RewardClip"
            require_default(self, "recipe", reason, "spatial")
        if not (isinstance(self.algorithm, GRPO) and "reference" in self.algorithm.needs):
            reason = "it changes a KL, which only GRPO with algorithm.kl_coef above 0 has"
            require_default(self, "recipe", reason, "kl_gate", "reference")
        for iteration in (0, SEVERAL):
            self._check_window(self.rollouts.window(iteration))
        if self.algorithm.pairs and self.updates_per_step > self.prompts_per_step:
            raise ValueError(
                f"recipe.updates_per_step is {self.updates_per_step}, but a loss of pairs divides "
                f"a step by prompts, and prompts_per_step is {self.prompts_per_step}"
            )

    def _check_window(self, steps: tuple[int, ...]) -> None:
        if not steps:
            raise ValueError(
                f"recipe.sampling.sde_window {type(self.sampling.sde_window).__name__} chooses "
                "no step to train; choose another, such as flowalign.sampling.AllButLast"
            )
        algorithm, rollouts = self.algorithm, self.rollouts
        alone = algorithm.pairs or algorithm.span is not None or self.spatial is not None
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
                f"recipe.step_weight is measured for single steps, {type(self.algorithm).__name__} "
                "trains spans of steps: give a rule or numbers, or choose GRPO"
            )
        if self.measured and self.prompts_per_step < 2 * self.updates_per_step:
            raise ValueError(
                f"recipe.prompts_per_step is {self.prompts_per_step} and updates_per_step is "
                f"{self.updates_per_step}: to measure recipe.step_weight, prompts need two halves; "
                f"raise prompts_per_step to at least {2 * self.updates_per_step}"
            )

    @property
    def rollouts(self) -> RolloutSettings:
        """Return the rollout settings, including the states and means that the loss needs."""
        return RolloutSettings(
            **self.rollout_fields(),
            keeps="all" if self.algorithm.chunks == "latent_change" else "trained",
            needs_means="mean_old" in self.algorithm.needs or self.spatial is not None,
            clips_process=True,
        )

    @property
    def measured(self) -> MeasuredWeight | None:
        """Return the settings of measured step weights, or None."""
        named = MeasuredWeight() if self.step_weight == "measured" else self.step_weight
        return named if isinstance(named, MeasuredWeight) else None

    @property
    def step_rule(self) -> StepWeight | list[float]:
        """Return the rule or the numbers of the step weights, or of their start if measured."""
        measured = self.measured
        if measured:
            return "uniform" if measured.start == "noise" else measured.start
        assert self.step_weight != "measured"
        assert not isinstance(self.step_weight, MeasuredWeight)
        return self.step_weight

    @property
    def updates(self) -> int:
        """Return the number of optimizer updates per training step."""
        return self.updates_per_step * self.epochs_per_step

    @property
    def examples_per_step(self) -> int:
        """Return the number of trajectories per step, over all processes."""
        return self.prompts_per_step * self.sampling.samples_per_prompt


def require_policy_gradient(recipe: Recipe) -> PolicyGradientSettings:
    """Return the recipe if it trains transitions of rollouts.

    Raises:
        ValueError: The recipe is not a policy-gradient recipe.
    """
    if not isinstance(recipe, PolicyGradientSettings):
        raise ValueError(
            f"the recipe {type(recipe).__name__} has no rollouts to measure: use "
            "flowalign.training.PolicyGradient"
        )
    return recipe
