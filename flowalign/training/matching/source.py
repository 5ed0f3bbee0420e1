"""Where examples come from: a stored dataset, or the policy itself."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field

from flowalign.distributed.processes import Processes
from flowalign.rewards.composite import Rewards
from flowalign.training.recipe import Log, RunContext
from flowalign.types import Examples, Label, Policy

NO_LABELS: Set[Label] = frozenset()
"""What most losses require beside media and prompts."""


@dataclass(frozen=True)
class Batch:
    """This process's share of the examples of one step, on the CPU or where they were made."""

    examples: Examples
    first: int
    """Position of this process's first pair or sample among those of all processes."""
    total: int
    """Pairs or samples of all processes."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Measurements of the making of the batch, equal on all processes."""


class BatchStream(ABC):
    """The batches of a started run."""

    @abstractmethod
    def batches(self, steps: Iterable[int]) -> Iterator[Batch]:
        """One batch a step: a function of the seed, the step and, for rollouts, the policy."""

    @abstractmethod
    def held_out(self) -> Examples | None:
        """This process's share of the pairs that are never trained on, if there are any."""


class DataSource(ABC):
    """Examples, as a run file names them."""

    @property
    @abstractmethod
    def paired(self) -> bool:
        """Whether it gives pairs; otherwise samples."""

    @property
    @abstractmethod
    def provides(self) -> Set[Label]:
        """The labels that its examples may have; a loss that requires another one is refused."""

    @property
    @abstractmethod
    def needs_expert(self) -> bool:
        """Whether an expert has to say what samples are matched to."""

    @property
    @abstractmethod
    def examples_per_step(self) -> int:
        """Pairs or samples of a step at most, over all processes."""

    @property
    @abstractmethod
    def prompt_files(self) -> list[str]:
        """Files of prompts that are sampled."""

    @abstractmethod
    def check(self, run: RunContext) -> None:
        """Raise ValueError for what no run can use, before anything heavy is loaded."""

    @abstractmethod
    def plan(self, evaluations_per_velocity: int, num_rewards: int) -> dict[str, str]:
        """Rows of the plan table about the examples of one step."""

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
        """Read, encode, get ready; only samples that have the labels that a loss requires.

        Raises:
            ValueError: these data cannot be trained on.
        """
