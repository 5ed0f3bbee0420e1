"""Define the settings of policy-gradient training that its loop reads."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from flowalign.credit.outcome import Outcome
from flowalign.functional.advantage import Combine, Scale
from flowalign.functional.completion import Completion
from flowalign.functional.weight import StepWeight
from flowalign.losses.policy_gradient.grpo import GRPO
from flowalign.rewards.checked import OnFailure
from flowalign.rewards.composite import Rewards
from flowalign.rewards.objectives import LogSigmoidCentred, Pareto, Thresholds
from flowalign.sampling.completion import CompletionRequest, CreditRequirements, credit_requirements
from flowalign.sampling.rollout import Sampling, empty_trajectory
from flowalign.training import checks
from flowalign.training.policy_gradient.chunks import check_chains
from flowalign.types import CreditEstimator, PolicyLoss, Trajectory, plain_requests
from flowalign.utils.ranges import NonNegativeFloat, PositiveFloat, PositiveInt, require_ranges


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Configures what to sample, how to credit it, and what to optimise."""

    sampling: Sampling
    """How the trajectories of a prompt are drawn."""
    credit: CreditEstimator = field(default_factory=Outcome)
    """Method that assigns credit to denoising steps, a class of `flowalign.credit`."""
    completion: Completion = field(default_factory=Completion)
    """How intermediate states are completed when the credit method requests their values."""
    algorithm: PolicyLoss = field(default_factory=GRPO)
    """Loss of the transitions: `GRPO` or `StepDPO`."""
    prompts_per_step: PositiveInt = 8
    """P, prompts of a step over all processes together."""
    rollout_batch_prompts: PositiveInt | None = None
    """Prompts of a process that are sampled together; rewards of one batch are computed while the
    next is sampled. Null: all of them. Changes time and memory, not the update."""
    updates_per_step: PositiveInt = 1
    """Number of optimizer updates into which the samples of a step are divided."""
    epochs_per_step: PositiveInt = 1
    """Number of passes over the samples of a step."""
    micro_batch: PositiveInt = 64
    """Transitions per forward and backward pass; changes memory, not the update."""
    advantage_scale: Scale = "group"
    """Standard deviation that divides centred credit. group: of the group (GRPO). batch: of the
    whole step (Flow-GRPO's global std). joint: of all steps of a prompt together. none: 1 (Dr.
    GRPO). given: the credit method returns advantages."""
    advantage_combine: Combine = "sum_of_advantages"
    """sum_of_advantages: each reward dimension is normalised by itself, then weighted (DanceGRPO).
    advantage_of_sum: rewards are weighted and added first (Flow-GRPO)."""
    value_transform: LogSigmoidCentred | None = None
    """Transform of rewards before they are credited; metrics show raw rewards. Null: none."""
    pareto: Pareto = "off"
    """Train only samples that no other dominates in all weighted rewards (Parrot). group: among
    those of their prompt. batch: among those of the step. off: train all."""
    thresholds: Thresholds | None = None
    """Thresholds of reward dimensions, which count while their mean misses them. Null: none."""
    advantage_clip: PositiveFloat = 5.0
    """Largest absolute advantage. Default: 5, as in Flow-GRPO's code."""
    std_floor: NonNegativeFloat = 1e-6
    """Standard deviation of credit up to which a group carries no signal and gets zeros."""
    step_weight: StepWeight | list[NonNegativeFloat] = "uniform"
    """Weight of each denoising step in the loss: a rule such as `uniform` or `dt`, or a number for
    each step, such as `flowalign probe` finds."""
    on_failed_reward: OnFailure = "raise"
    """raise: a failed reward ends the run. drop_sample: transitions whose credit is unknown are not
    trained. drop_group: nor are those of the other samples of their prompt at the same step."""
    on_failed_check: checks.OnFailure = "raise"
    """raise: a failed check of the first updates stops the run. warn: it is logged."""

    def __post_init__(self) -> None:
        """Reject settings that no run can use, before anything heavy is loaded."""
        require_ranges(self, "recipe")
        self._check_step_weight()
        if self.updates_per_step > self.examples_per_step:
            raise ValueError(
                f"recipe.updates_per_step is {self.updates_per_step}, more than the "
                f"{self.examples_per_step} samples of a step that they are made of"
            )
        if self.sampling.samples_per_prompt == 1 and self.advantage_scale == "group":
            raise ValueError(
                "sampling.samples_per_prompt is 1: a group of one has no spread to scale by. "
                "Use at least 2, or advantage_scale batch"
            )
        for iteration in (0, 10**6):
            steps = self.sampling.sde_window.steps(
                self.sampling.num_steps, iteration, torch.Generator()
            )
            self.requested(steps)
            if self.algorithm.chunks is not None:
                check_chains(self.empty_trajectory(steps))
        if self.algorithm.pairs and self.updates_per_step > self.prompts_per_step:
            raise ValueError(
                f"recipe.updates_per_step is {self.updates_per_step}, but a loss of pairs divides "
                f"a step by prompts, of which there are {self.prompts_per_step}"
            )

    def _check_step_weight(self) -> None:
        if isinstance(self.step_weight, str):
            return
        if len(self.step_weight) != self.sampling.num_steps or not any(self.step_weight):
            raise ValueError(
                f"recipe.step_weight is {self.step_weight}; give a number for each of the "
                f"{self.sampling.num_steps} denoising steps, not all 0, or the name of a rule"
            )

    @property
    def updates(self) -> int:
        """Return the number of optimizer updates of one step of the loop."""
        return self.updates_per_step * self.epochs_per_step

    @property
    def examples_per_step(self) -> int:
        """Return the number of trajectories of one step, over all processes."""
        return self.prompts_per_step * self.sampling.samples_per_prompt

    def check_rewards(self, rewards: Rewards) -> None:
        """Raise ValueError if a setting names reward dimensions that do not fit."""
        rewards.check_weights()
        for part in (self.value_transform, self.thresholds):
            if part:
                part.check(rewards)

    def empty_trajectory(self, steps: Sequence[int]) -> Trajectory:
        """Return the samples of one prompt before they are drawn.

        Raises:
            ValueError: The samples cannot be arranged in this way.
        """
        sigmas = torch.linspace(1, 0, self.sampling.num_steps + 1)
        return empty_trajectory(self.sampling, steps, plain_requests([""]), sigmas)

    def requested(self, steps: Sequence[int]) -> tuple[CompletionRequest, ...]:
        """Return the states that the credit method values.

        Raises:
            ValueError: The settings do not meet the needs of the credit method.
        """
        return self._requirements(steps).requested

    def kept(self, steps: Sequence[int]) -> tuple[int, ...]:
        """Return the indices of the states that a rollout keeps.

        They are those of trained steps, the last, and those that credit starts from or reads.
        """
        num_steps = self.sampling.num_steps
        if self.algorithm.chunks == "latent_change":
            return tuple(range(num_steps + 1))
        needs = self._requirements(steps)
        started = {k for k, how in needs.requested if not how.follows_rollout}
        return tuple(sorted({num_steps, *steps, *(k + 1 for k in steps), *started, *needs.read}))

    def _requirements(self, steps: Sequence[int]) -> CreditRequirements:
        needs = credit_requirements(self.credit, self.empty_trajectory(steps), self.completion)
        if needs.credit.normalised != (self.advantage_scale == "given"):
            advised = (
                "advantages: set it to given"
                if needs.credit.normalised
                else "no advantages: choose from group, batch, joint, none"
            )
            raise ValueError(
                f"recipe.advantage_scale is {self.advantage_scale}, but "
                f"{type(self.credit).__name__} gives {advised}"
            )
        return needs
