"""The settings of policy-gradient training that the functions of its loop read."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from flowalign.credit.outcome import Outcome
from flowalign.functional.advantage import Combine, Scale
from flowalign.functional.completion import Completion
from flowalign.functional.weight import StepWeight
from flowalign.losses.policy_gradient.grpo import GRPO
from flowalign.rewards.composite import OnFailure, Rewards
from flowalign.rewards.objectives import LogSigmoidCentred, Pareto, Thresholds
from flowalign.sampling.completion import CompletionRequest, CreditRequirements, credit_requirements
from flowalign.sampling.rollout import Sampling, empty_trajectory
from flowalign.training import checks
from flowalign.training.policy_gradient.chunks import check_chains
from flowalign.types import CreditEstimator, PolicyLoss, Trajectory


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to sample, what to credit, what to optimise."""

    sampling: Sampling
    credit: CreditEstimator = field(default_factory=Outcome)
    completion: Completion = field(default_factory=Completion)
    """How intermediate states are finished when the credit method asks for their values."""
    algorithm: PolicyLoss = field(default_factory=GRPO)
    prompts_per_step: int = 8
    """P over all processes together."""
    rollout_batch_prompts: int | None = None
    """Prompts of a process that are sampled together; rewards of one batch are computed while the
    next is sampled. Null: all of them. Changes time and memory, not the update."""
    updates_per_step: int = 1
    """Into how many optimizer updates the samples of a step are divided."""
    epochs_per_step: int = 1
    """How often the samples of a step are gone through."""
    micro_batch: int = 64
    """Transitions per forward and backward pass; changes memory, not the update."""
    advantage_scale: Scale = "group"
    advantage_combine: Combine = "sum_of_advantages"
    value_transform: LogSigmoidCentred | None = None
    """Applied to rewards before they are credited; metrics show them as they are."""
    pareto: Pareto = "off"
    """Train only samples that no other dominates in all weighted rewards (Parrot): among those of
    their prompt, or of the whole step."""
    thresholds: Thresholds | None = None
    """Reward dimensions that count as long as their mean misses a threshold."""
    advantage_clip: float = 5.0
    std_floor: float = 1e-6
    """Groups whose rewards spread less than this carry no signal."""
    step_weight: StepWeight = "uniform"
    on_failed_reward: OnFailure = "raise"
    on_failed_check: checks.OnFailure = "raise"

    def __post_init__(self) -> None:
        """Reject what no run can use, before anything heavy is loaded."""
        for name in ("prompts_per_step", "updates_per_step", "epochs_per_step", "micro_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"recipe.{name} is {getattr(self, name)}; it must be at least 1")
        if self.rollout_batch_prompts is not None and self.rollout_batch_prompts < 1:
            raise ValueError(
                f"recipe.rollout_batch_prompts is {self.rollout_batch_prompts}; "
                "it must be at least 1, or null for all"
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

    @property
    def updates(self) -> int:
        """Optimizer updates of one step of the loop."""
        return self.updates_per_step * self.epochs_per_step

    @property
    def examples_per_step(self) -> int:
        """Trajectories of one step, over all processes."""
        return self.prompts_per_step * self.sampling.samples_per_prompt

    def check_rewards(self, rewards: Rewards) -> None:
        """Raise ValueError where reward dimensions are named that do not fit."""
        rewards.check_weights()
        for part in (self.value_transform, self.thresholds):
            if part:
                part.check(rewards)

    def empty_trajectory(self, steps: Sequence[int]) -> Trajectory:
        """The samples of one prompt before they are drawn. ValueError if they do not fit."""
        sigmas = torch.linspace(1, 0, self.sampling.num_steps + 1)
        return empty_trajectory(self.sampling, steps, [""], sigmas)

    def requested(self, steps: Sequence[int]) -> tuple[CompletionRequest, ...]:
        """The states that the credit method values. ValueError if its needs are not met."""
        return self._requirements(steps).requested

    def kept(self, steps: Sequence[int]) -> tuple[int, ...]:
        """The states that a rollout keeps: of trained steps, the last, and what credit starts from
        or reads."""
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
