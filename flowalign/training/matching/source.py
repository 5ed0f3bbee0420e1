"""Define where examples come from: a stored dataset, or the policy itself."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field

from flowalign.distributed.processes import Processes
from flowalign.rewards.composite import Rewards
from flowalign.training.recipe import Log, RunContext
from flowalign.types import Examples, Label, Policy

NO_LABELS: Set[Label] = frozenset()
"""Labels that most losses require beside media and prompts: none."""


@dataclass(frozen=True)
class Batch:
    """Holds this process's share of the examples of a step, on the CPU or where they were made."""

    examples: Examples
    """Pairs or samples of this process."""
    first: int
    """Position of this process's first pair or sample among those of all processes."""
    total: int
    """Number of pairs or samples of all processes."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Measurements taken while the batch was made, equal on all processes."""


class BatchStream(ABC):
    """Yields the batches of a started run."""

    @abstractmethod
    def batches(self, steps: Iterable[int]) -> Iterator[Batch]:
        """Yield a batch per step: a function of seed, step and, for rollouts, the policy."""

    @abstractmethod
    def held_out(self) -> Examples | None:
        """Return this process's share of the pairs that are never trained on, or None."""


class DataSource(ABC):
    """Configures where examples come from: the component `recipe.data` of a run file."""

    @property
    @abstractmethod
    def paired(self) -> bool:
        """Return True for pairs, False for samples."""

    @property
    @abstractmethod
    def provides(self) -> Set[Label]:
        """Return the labels that the examples may have.

        A loss that requires another one is refused.
        """

    @property
    @abstractmethod
    def needs_expert(self) -> bool:
        """Return whether the examples are matched to the velocities of an expert."""

    @property
    @abstractmethod
    def examples_per_step(self) -> int:
        """Return the pairs or samples of a step at most, over all processes."""

    @property
    @abstractmethod
    def prompt_files(self) -> list[str]:
        """Return the files of prompts that are sampled."""

    @abstractmethod
    def check(self, run: RunContext) -> None:
        """Raise ValueError for settings that no run can use, before anything heavy is loaded."""

    @abstractmethod
    def plan(self, evaluations_per_velocity: int, num_rewards: int) -> dict[str, str]:
        """Return the rows of the plan table about the examples of one step."""

    @abstractmethod
    def open(
        self,
        policy: Policy,
        rewards: Rewards,
        seed: int,
        processes: Processes,
        requires: Set[Label] = NO_LABELS,
        log: Log = lambda _: None,
    ) -> BatchStream:
        """Read, encode and prepare the examples that have the labels which the loss requires.

        Raises:
            ValueError: These data cannot be trained on.
        """
