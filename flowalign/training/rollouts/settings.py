"""Define the settings of rollouts: what is sampled, how it is credited and compared."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NoReturn

import torch

from flowalign.credit.critic import Critic
from flowalign.credit.outcome import Outcome
from flowalign.functional.completion import Completion
from flowalign.sampling.completion import CompletionRequest, CreditRequirements, credit_requirements
from flowalign.sampling.rollout import empty_trajectory
from flowalign.sampling.settings import Sampling
from flowalign.training.rollouts.comparison import Comparison
from flowalign.types import CreditEstimator, Trajectory, plain_requests
from flowalign.utils.ranges import PositiveFloat, PositiveInt


@dataclass(frozen=True, kw_only=True)
class RolloutSettings(Comparison, ABC):
    """Configures what to sample, how to credit it, and how credit becomes advantages."""

    key: ClassVar[str] = "recipe"
    """Key of these settings in run files, for messages."""
    clips_process: ClassVar[bool] = False
    """Whether process rewards can be trained beside the credit of outcomes, clipped apart."""

    sampling: Sampling
    """How the trajectories of a prompt are drawn."""
    credit: CreditEstimator | None
    """Method that assigns credit to denoising steps, a class of `flowalign.credit`. Null: a sample
    has the credit of its outcome."""
    completion: Completion = field(default_factory=Completion)
    """How intermediate states are completed when the credit method requests their values."""
    critic: Critic | None = None
    """Regression that predicts outcomes from the denoiser's features, for credit that reads its
    predictions. Null: none."""
    prompts_per_step: PositiveInt = 8
    """P, prompts of a step over all processes together."""
    rollout_batch_prompts: PositiveInt | None = None
    """Prompts of a process that are sampled together; rewards of one batch are computed while the
    next is sampled. Null: all of them. Changes time and memory, not the update."""
    advantage_clip: PositiveFloat = 5.0
    """Largest absolute advantage. Default: 5, as in Flow-GRPO's code."""
    extremes: PositiveInt | None = None
    """Number of the best and of the worst of each group that are trained (DanceGRPO for videos: 4
    of 24), by their advantage among all. Null: all are."""

    @abstractmethod
    def kept(self, steps: Sequence[int]) -> tuple[int, ...]:
        """Return the indices of the states that a rollout keeps, if `steps` are trained."""

    @property
    @abstractmethod
    def needs_means(self) -> bool:
        """Return whether a rollout keeps the means of trained transitions."""

    def check_comparison(self) -> None:
        """Raise ValueError if samples cannot be compared so."""
        size = self.sampling.samples_per_prompt
        self.check_groups(self.key, size)
        if self.extremes is not None and 2 * self.extremes > size:
            raise ValueError(
                f"{self.key}.extremes is {self.extremes}: the best and the worst {self.extremes} "
                f"are more than the {size} samples of a prompt"
            )

    @property
    def num_samples(self) -> int:
        """Return the number of trajectories of one step, over all processes."""
        return self.prompts_per_step * self.sampling.samples_per_prompt

    def window(self, iteration: int, generator: torch.Generator | None = None) -> tuple[int, ...]:
        """Return the trained steps in one step of the loop."""
        drawn = torch.Generator() if generator is None else generator
        return self.sampling.sde_window.steps(self.sampling.num_steps, iteration, drawn)

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
        return self.requirements(steps).requested

    @property
    def history(self) -> int:
        """Return the number of earlier steps whose outcomes the credit method compares with."""
        return self.requirements(self.window(0)).history

    def credited(self, steps: Sequence[int]) -> tuple[int, ...]:
        """Return the indices of the states that credit starts from or reads, and of the last."""
        needs = self.requirements(steps)
        started = {k for k, how in needs.requested if not how.follows_rollout}
        return tuple(sorted({self.sampling.num_steps, *started, *needs.read}))

    def observed(self, steps: Sequence[int]) -> tuple[int, ...]:
        """Return the indices of the states whose features a rollout keeps."""
        return tuple(sorted(self.requirements(steps).observed))

    def refuse_features(self) -> None:
        """Raise ValueError for credit that reads features of all tokens on one process."""
        if self.observed(self.window(0)):
            raise ValueError(
                f"{self.key}.credit reads features of the denoiser, whose tokens "
                "sharding.context_degree divides: set it to 1, or take credit without a critic"
            )

    def requirements(self, steps: Sequence[int]) -> CreditRequirements:
        """Return what the credit method needs from a rollout.

        Raises:
            ValueError: The settings do not meet these needs.
        """
        method = self.credit or Outcome()
        needs = credit_requirements(method, self.empty_trajectory(steps), self.completion)
        if needs.credit.normalised != (self.advantage_scale == "given"):
            advised = (
                "advantages: set it to given"
                if needs.credit.normalised
                else "no advantages: choose from group, batch, joint, pooled, none, leave_one_out"
            )
            raise ValueError(
                f"{self.key}.advantage_scale is {self.advantage_scale}, but "
                f"{type(method).__name__} gives {advised}"
            )
        if needs.credit.process is not None and not self.clips_process:
            refuse_process(self.key, method)
        between = sorted({k for k, _ in needs.requested if k < self.sampling.num_steps})
        if between and self.sampling.tail_ratio is not None:
            raise ValueError(
                f"{self.key}.sampling.tail_ratio shortens rollouts, but {type(method).__name__} "
                f"values the states {between} on the whole schedule: set it to null"
            )
        if bool(needs.predicted) != (self.critic is not None):
            name, critic = type(method).__name__, f"{self.key}.critic"
            raise ValueError(
                f"{critic} is null, but {name} reads what a critic predicts: set it to {{}}"
                if needs.predicted
                else f"{critic} is set, but {name} reads no predictions: set it to null, or "
                f"{self.key}.credit to flowalign.credit.LambdaReturn"
            )
        return needs


def refuse_process(key: str, method: CreditEstimator) -> NoReturn:
    """Raise ValueError: nothing would train the process rewards of this credit method."""
    raise ValueError(
        f"{key}.credit is {type(method).__name__}, whose process rewards only GRPO on transitions "
        "clips apart, with a surrogate that needs no best sample;\n"
        "choose flowalign.credit.LatentGain, or recipe.algorithm flowalign.losses.GRPO"
    )
