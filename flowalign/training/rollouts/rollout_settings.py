"""Define the settings of rollouts: sampling, values, credit and advantages."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from flowalign.credit.chain import Outcome
from flowalign.credit.critic import Critic
from flowalign.sampling.rollout import empty_trajectory
from flowalign.sampling.sampling_settings import Sampling
from flowalign.training.rollouts.advantage_config import AdvantageConfig
from flowalign.types import (
    CreditEstimator,
    LatentReward,
    PastOutcomes,
    SharedRows,
    Trajectory,
    ValueFunction,
    plain_requests,
)
from flowalign.types.trajectory import Completion, CompletionRequest
from flowalign.utils.errors import require_default
from flowalign.utils.ranges import PositiveInt

SEVERAL = 10**6
"""Index of a late training step; its window is checked in addition to the first one."""


@dataclass(frozen=True, kw_only=True)
class RolloutFields:
    """Rollout settings of run files, which recipes and data sources share."""

    prompts_per_step: PositiveInt = 8
    """Number P of prompts per step, over all processes."""
    rollout_batch_prompts: PositiveInt | None = None
    """Number of prompts that a process samples together. Rewards of one batch are computed while
    the next one is sampled. It changes time and memory, not the update. Null: all prompts."""
    sampling: Sampling
    """Sampling of the trajectories of a prompt."""
    credit: CreditEstimator | None = None
    """Method that assigns credit to denoising steps, a class from `flowalign.credit`. Null: the
    outcome is the credit."""
    completion: Completion = field(default_factory=Completion)
    """Completion of the intermediate states that the credit method values."""
    critic: Critic | None = None
    """Regression of outcomes on the denoiser's features, for credit methods that need a critic.
    Null: none."""
    advantages: AdvantageConfig = field(default_factory=AdvantageConfig)
    """Comparison of credit: normalisation, weighting of rewards, clipping and selection."""

    def rollout_fields(self) -> dict[str, Any]:
        """Return the shared settings by name."""
        return {one.name: getattr(self, one.name) for one in fields(RolloutFields)}


class CreditRequirements(ValueFunction):
    """Requirements of a credit method on a rollout, recorded with a trajectory of zeros.

    Raises:
        ValueError: The method cannot be applied to trajectories with the layout of `empty`.
    """

    def __init__(self, method: CreditEstimator, empty: Trajectory, how: Completion):
        self.method, self.empty, self.how = type(method).__name__, empty, how
        self.history = 0
        """Number of earlier training steps with outcomes that the method uses."""
        self.critic_read: set[int] = set()
        """Indices of the states with outcomes that the critic predicts."""
        requested: set[CompletionRequest] = set()
        scores: set[tuple[LatentReward, int]] = set()
        self._requested, self._scores = requested, scores
        states, hidden = _Zeros(empty.rows), _Zeros(empty.rows)
        self.credit = method(replace(empty, states=states, hidden=hidden), self)
        """Credit that the method assigned to the zeros."""
        self.requested = tuple(sorted(requested, key=lambda each: (each[0], str(each[1]))))
        """States that the method requests values for."""
        self.scores = tuple(sorted(scores, key=lambda each: each[1]))
        """Pairs of a latent reward and the index of a state that it scores for the method."""
        self.read = states.read | {k for _, k in scores}
        """Indices of the states that the method reads directly."""
        self.observed = hidden.read | self.critic_read
        """Indices of the states with features that the method or its critic reads."""

    def __call__(self, ks: Sequence[int], how: Completion | None = None) -> Tensor:
        """Return zeros, and record the states with their completion."""
        end = self.empty.num_steps
        self._requested.update((k, how or self.how if k < end else self.how) for k in ks)
        return self._make_zeros("value", ks, end)

    def past(self, num_steps: int) -> PastOutcomes | None:
        """Return no outcomes, and record the number of steps."""
        self.history = max(self.history, num_steps)
        return None

    def predicted(self, ks: Sequence[int]) -> Tensor:
        """Return zeros, and record the states."""
        self.critic_read.update(ks)
        return self._make_zeros("prediction", ks, self.empty.num_steps - 1)

    def scored(self, ks: Sequence[int], reward: LatentReward) -> Tensor:
        """Return zeros, and record the states with their latent reward."""
        self._scores.update((reward, k) for k in ks)
        return self._make_zeros("latent reward", ks, self.empty.num_steps)

    def _make_zeros(self, what: str, ks: Sequence[int], last: int) -> Tensor:
        for k in ks:
            if not 0 <= k <= last:
                raise ValueError(
                    f"{self.method} asks for the {what} of state {k}; there are states 0 to {last}"
                )
        return torch.zeros(len(self.empty.logp), len(ks), 1)


class _Zeros(Mapping[int, Tensor]):
    """Zeros as placeholders for states or features, with a record of the indices that are read."""

    def __init__(self, rows: SharedRows):
        self.rows = rows
        self.read: set[int] = set()

    def __getitem__(self, k: int) -> Tensor:
        self.read.add(k)
        return torch.zeros(len(self.rows.unique_rows(k)), 1)

    def __iter__(self) -> Iterator[int]:
        return iter(self.read)

    def __len__(self) -> int:
        return len(self.read)


@dataclass(frozen=True, kw_only=True)
class RolloutSettings(RolloutFields):
    """Rollout settings with the requirements of the loss that trains on them."""

    key: str = "recipe"
    """Key of the settings in run files, for messages."""
    keeps: Literal["credited", "trained", "all"] = "credited"
    """States that a rollout keeps. credited: the states that credit reads. trained: also the states
    of trained steps. all: all states."""
    also_kept: Sequence[int] = ()
    """Indices of further states that a rollout keeps."""
    needs_means: bool = False
    """Whether a rollout keeps the means of trained transitions."""
    keeps_graphs: bool = False
    """Whether a rollout keeps the graphs of the velocities of trained steps."""
    clips_process: bool = False
    """Whether the loss trains process rewards with a separate clip."""

    scout_steps: int | None = None
    """Denoising steps of the previews that choose the samples. None: no previews."""

    @property
    def phases(self) -> "tuple[RolloutSettings, ...]":
        """Return the settings of previews and of chosen samples; without previews, only these."""
        if self.scout_steps is None:
            return (self,)
        plain, sampling = replace(self, scout_steps=None), self.sampling
        shorter = sampling.tail_ratio is not None and self.scout_steps < sampling.num_steps
        ratio = 1.0 if shorter else sampling.tail_ratio  # previews make all of their steps
        previews = replace(sampling, num_steps=self.scout_steps, tail_ratio=ratio)
        chosen = replace(sampling, samples_per_prompt=2 * (self.advantages.extremes or 1))
        return replace(plain, sampling=previews, also_kept=(0,)), replace(plain, sampling=chosen)

    def check_groups(self) -> None:
        """Raise ValueError if the samples of a prompt cannot be compared."""
        self.advantages.check_groups(self.key, self.sampling.samples_per_prompt)

    @property
    def num_samples(self) -> int:
        """Return the number of trajectories per step, over all processes."""
        return self.prompts_per_step * self.sampling.samples_per_prompt

    def window(self, iteration: int, generator: torch.Generator | None = None) -> tuple[int, ...]:
        """Return the trained denoising steps of one training step."""
        drawn = torch.Generator() if generator is None else generator
        return self.sampling.sde_window.steps(self.sampling.num_steps, iteration, drawn)

    def credited_window(self, iteration: int) -> tuple[int, ...]:
        """Return the window; raise ValueError if there is credit but no stochastic step."""
        steps = self.window(iteration)
        if self.credit is not None and not steps:
            raise ValueError(
                f"{self.key}.credit is {type(self.credit).__name__}, which credits stochastic "
                f"steps; {self.key}.sampling.sde_window has none: choose AllButLast, or no credit"
            )
        return steps

    def empty_trajectory(self, steps: Sequence[int]) -> Trajectory:
        """Return the samples of one prompt before they are drawn.

        Raises:
            ValueError: The branching does not fit the number of samples or the steps.
        """
        sigmas = torch.linspace(1, 0, self.sampling.num_steps + 1)
        return empty_trajectory(self.sampling, steps, plain_requests([""]), sigmas)

    def kept_states(self, steps: Sequence[int]) -> tuple[int, ...]:
        """Return the indices of the states that a rollout keeps; `steps` are the trained steps."""
        if self.keeps == "all":
            return tuple(range(self.sampling.num_steps + 1))
        trained = {*steps, *(k + 1 for k in steps)} if self.keeps == "trained" else set[int]()
        needs = self.requirements(steps)
        started = {k for k, how in needs.requested if not how.follows_rollout}
        also = {self.sampling.num_steps, *self.also_kept}
        return tuple(sorted({*also, *trained, *started, *needs.read}))

    def requested(self, steps: Sequence[int]) -> tuple[CompletionRequest, ...]:
        """Return the states that the credit method values.

        Raises:
            ValueError: The settings do not fit the credit method.
        """
        return self.requirements(steps).requested

    def refuse_features(self) -> None:
        """Raise ValueError for credit with features, which context parallelism cannot compute."""
        if self.requirements(self.window(0)).observed:
            raise ValueError(
                f"{self.key}.credit reads features of the denoiser, but sharding.context_degree "
                "divides its tokens: set it to 1, or use credit without a critic"
            )

    def requirements(self, steps: Sequence[int]) -> CreditRequirements:
        """Return the requirements of the credit method on a rollout.

        Raises:
            ValueError: The settings do not fit the credit method.
        """
        method = self.credit or Outcome()
        name = type(method).__name__
        needs = CreditRequirements(method, self.empty_trajectory(steps), self.completion)
        if needs.credit.normalised != (self.advantages.scale == "given"):
            advised = "no advantages: choose from group, batch, joint, pooled, none, leave_one_out"
            raise ValueError(
                f"{self.key}.advantages.scale is {self.advantages.scale}, but {name} gives "
                + ("advantages: set it to given" if needs.credit.normalised else advised)
            )
        if needs.credit.process is not None and not self.clips_process:
            refuse_process(self.key, method)
        between = sorted({k for k, _ in needs.requested if k < self.sampling.num_steps})
        if between:
            reason = f"{name} values the states {between} of the whole schedule"
            require_default(self, self.key, reason, "sampling.tail_ratio")
        if needs.critic_read and self.critic is None:
            raise ValueError(
                f"{self.key}.critic is null, but {name} needs predictions of a critic: "
                "set it to {}"
            )
        if not needs.critic_read:
            reason = f"{name} reads no predictions, unlike flowalign.credit.LambdaReturn"
            require_default(self, self.key, reason, "critic")
        return needs


def refuse_process(key: str, method: CreditEstimator) -> NoReturn:
    """Raise ValueError because the loss does not train the process rewards of the method."""
    raise ValueError(
        f"{key}.credit is {type(method).__name__}, which has process rewards. Only GRPO on "
        "transitions trains these; choose it, or flowalign.credit.LatentGain"
    )
