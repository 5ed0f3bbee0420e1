"""The interface of a kind of training: a recipe, named in a run file, opens the loop of a run."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flowalign.rewards.composite import OnFailure, Rewards
from flowalign.training.learner import Learner
from flowalign.types import ModelPlan, Policy

Log = Callable[[str], None]
"""Shows a person one message."""
Stage = Literal["always", "encoding", "sampling", "updating", "verifying", "main"]
"""When memory of the device is taken; "main": never, it is main memory."""


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What a recipe is told of the run file that it stands in."""

    policy: Policy
    rewards: Rewards
    num_steps: int
    """Steps of the loop in the whole run."""
    seed: int = 0
    evaluates: bool = False
    """Whether the run evaluates at all."""
    evaluate_every: int = 0
    """Steps between evaluations; 0 evaluates before the first step and after the last only."""
    has_ema: bool = False
    """Whether the run keeps averaged weights."""


@dataclass(frozen=True)
class MemoryPart:
    """The memory that one purpose takes on one process; a rough estimate."""

    name: str
    num_bytes: int
    stage: Stage = "always"
    savings: Mapping[str, int] = field(default_factory=dict)
    """Settings of the run file, such as "recipe.micro_batch: 1", and the bytes each saves alone."""


@dataclass(frozen=True, kw_only=True)
class RecipePlan:
    """What one step of a recipe does and takes, known before any weight is read."""

    rows: Mapping[str, str]
    """Rows of the plan table."""
    parts: Sequence[MemoryPart] = ()
    """What a step keeps in memory."""
    evaluations_per_example: int = 1
    """Network evaluations with gradient for one element of a micro-batch."""
    decode_batches: Mapping[str, int] = field(default_factory=dict)
    """Settings that say how many samples are decoded at once, and their values."""
    weight_copies: int = 0
    """Copies of the trained weights that are kept beside optimizer and average."""


class Loop(ABC):
    """A started training. Evaluation, checkpoints and logs are the caller's."""

    @abstractmethod
    def run(self, steps: Iterable[int]) -> Iterator[dict[str, float]]:
        """Make these steps, yielding the metrics of each."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Measure what belongs to this kind of training, beside the rewards of held-out prompts."""

    @abstractmethod
    def draw(self) -> float:
        """Write figures of the last step, if any. Returns the seconds spent."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold for this loop, as JSON values."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Put back what `state` gave. Called before `run`."""


class Recipe(ABC):
    """One kind of training, with all its settings: the component `recipe` of a run file."""

    micro_batch: int
    """Elements of one forward and backward pass."""
    on_failed_reward: OnFailure
    """Whether a reward that could not be computed ends the run, or drops samples."""

    @property
    @abstractmethod
    def prompt_files(self) -> Sequence[str]:
        """Files whose prompts are sampled for training."""

    @property
    @abstractmethod
    def updates(self) -> int:
        """Optimizer updates of one step of the loop."""

    @property
    @abstractmethod
    def examples_per_step(self) -> int:
        """Trajectories, pairs or samples of one step at most, over all processes."""

    @property
    @abstractmethod
    def sampler(self) -> tuple[int, int] | None:
        """Denoising steps and samples per network call of training; None where none is sampled."""

    @abstractmethod
    def check(self, run: RunContext) -> None:
        """Raise ValueError for what no run can use, before any weight is read."""

    @abstractmethod
    def plan(self, run: RunContext, model: ModelPlan, world: int) -> RecipePlan:
        """What a step on `world` processes does and takes. ValueError where it cannot be done."""

    @abstractmethod
    def open(self, run: RunContext, learner: Learner, folder: Path, log: Log) -> Loop:
        """Get everything ready that the first step needs, with the weights loaded.

        `folder` is the run directory.

        Raises:
            ValueError: the data of this recipe cannot be trained on.
        """
