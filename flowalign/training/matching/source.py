"""Where examples come from: a stored dataset, or the policy itself."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field

from flowalign.distributed.processes import Processes
from flowalign.rewards.composite import Rewards
from flowalign.training.learner import Learner
from flowalign.training.matching.recipe import Preference
from flowalign.training.matching.references import Base
from flowalign.types import Examples, Known

NOTHING: Set[Known] = frozenset()
"""What most losses need beside media and prompts."""


@dataclass(frozen=True)
class Batch:
    """This process's share of the examples of one step, on the CPU or where they were made."""

    examples: Examples
    first: int
    """Place of my first pair or sample among everyone's."""
    total: int
    """Pairs or samples of all processes."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What making it has shown, equal on all processes."""


class Stream(ABC):
    """Examples of a started run."""

    @abstractmethod
    def batches(self, steps: Iterable[int]) -> Iterator[Batch]:
        """One batch a step: a function of the seed, the step and, of rollouts, the policy."""

    @abstractmethod
    def held_out(self) -> Examples | None:
        """My share of the pairs that are never trained on, if there are any."""


class Source(ABC):
    """Examples as a run file names them."""

    @property
    @abstractmethod
    def paired(self) -> bool:
        """Whether it gives pairs; otherwise samples."""

    @property
    @abstractmethod
    def knows(self) -> Set[Known]:
        """What it may know of its examples; a loss that needs anything else is refused."""

    @property
    @abstractmethod
    def needs_expert(self) -> bool:
        """Whether an expert has to say what rows are matched to."""

    @property
    @abstractmethod
    def units_per_step(self) -> int:
        """Pairs or samples of a step at most, over all processes."""

    @property
    @abstractmethod
    def prompt_files(self) -> list[str]:
        """Files of prompts that are sampled."""

    @abstractmethod
    def check(self, rewards: Rewards) -> None:
        """Raise ValueError for what no run can use, before anything heavy is loaded."""

    @abstractmethod
    def plan(self, evaluations_per_velocity: int, num_rewards: int) -> dict[str, str]:
        """Rows of the plan table about the examples of one step."""

    @abstractmethod
    def open(
        self, learner: Learner, rewards: Rewards, seed: int, processes: Processes,
        needs: Set[Known] = NOTHING,
    ) -> Stream:  # fmt: skip
        """Read, encode, get ready; of samples, only what has the labels that a loss needs.

        Raises:
            ValueError: these data cannot be trained on.
        """


def check_together(recipe: Preference, data: Source) -> None:
    """Whether the loss can learn from such data, and everything in the recipe is used.

    Raises:
        ValueError: it cannot, or something is not.
    """
    loss = type(recipe.loss).__name__
    if recipe.loss.traits.paired and not data.paired:
        raise ValueError(
            f"recipe.loss {loss} compares pairs, "
            "but data gives samples: set data.kind to pairs, or choose KTO, RWR or SFT"
        )
    if missing := sorted(recipe.loss.traits.needs - data.knows):
        raise ValueError(
            f"recipe.loss {loss} needs {' and '.join(missing)}, which data of class "
            f"{type(data).__name__} never has here: it takes pairs that are stored"
        )
    if data.needs_expert != (recipe.expert is not None):
        raise ValueError(
            "recipe.expert and data.kind attributes belong together: "
            "an expert says what rows with attributes are matched to"
        )
    if not (recipe.needs_reference or isinstance(recipe.reference, Base)):
        raise ValueError(
            f"recipe.reference {type(recipe.reference).__name__} is not looked at: "
            f"{loss} needs no reference, and recipe.kl is 0"
        )
    if recipe.loss.traits.whole_batch:
        recipe.check_whole_batch(data.units_per_step)
