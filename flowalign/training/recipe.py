"""Define the interface of recipes, which configure a kind of training and open its loop."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowalign.rewards.checked import OnFailure
from flowalign.rewards.composite import Rewards
from flowalign.training.learner import Learner, Optimizer
from flowalign.training.recipe_plan import RecipePlan
from flowalign.types import ModelPlan, Policy, PromptConditioning

Log = Callable[[str], None]
"""Function that shows a message to the user."""


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Parts of the run file that a recipe depends on."""

    policy: Policy
    """Model to train."""
    rewards: Rewards
    """Reward models with their weights."""
    num_steps: int
    """Number of training steps of the run."""
    seed: int = 0
    """Seed of every random draw of the run."""
    evaluates: bool = False
    """Whether the run has evaluations."""
    evaluate_every: int = 0
    """Number of training steps between evaluations. 0: only before the first and after the last
    step."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    """Optimizer of the policy."""
    has_ema: bool = False
    """Whether the run keeps averaged weights."""
    conditioning: PromptConditioning | None = None
    """Conditioning added to the prompts. None: plain prompts."""

    def check_conditioning(self) -> None:
        """Raise ValueError if the conditioning uses dimensions without a reward."""
        if self.conditioning:
            weights = zip(self.rewards.dims, self.rewards.weights.tolist(), strict=True)
            self.conditioning.check(self.policy, dict(weights))


class Loop(ABC):
    """Training loop of a run; its caller evaluates, saves checkpoints and writes logs."""

    @abstractmethod
    def run(self, steps: Iterable[int]) -> Iterator[dict[str, float]]:
        """Make the given steps, and yield the metrics of each step."""

    def evaluate(self) -> dict[str, float]:
        """Return recipe-specific evaluation metrics; empty by default.

        The rewards of held-out prompts are evaluated separately.
        """
        return {}

    def draw(self) -> float:
        """Write the figures of the last step, if any, and return the seconds spent."""
        return 0.0

    def state(self) -> dict[str, Any]:
        """Return the loop's state for a checkpoint, as JSON values."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: B027 (most draws follow the seed)
        """Restore the state of a checkpoint; called before `run`."""


class Recipe(ABC):
    """Configuration of one kind of training: the component `recipe` of a run file."""

    micro_batch: int
    """Number of elements per forward and backward pass."""
    on_failed_reward: OnFailure
    """Action after a failed reward: end the run, or drop samples."""

    @property
    def open_files(self) -> Sequence[str]:
        """Return the files of the run directory that `open` writes and can resume from."""
        return ()

    @property
    @abstractmethod
    def prompt_files(self) -> Sequence[str]:
        """Return the paths of the prompt files for training."""

    @property
    def updates(self) -> int:
        """Return the number of optimizer updates per training step."""
        return 1

    @property
    @abstractmethod
    def examples_per_step(self) -> int:
        """Return the largest number of trajectories, pairs or samples per step.

        It counts all processes.
        """

    @property
    def sampler(self) -> tuple[int, int] | None:
        """Return the number of denoising steps, and of samples per network call.

        None if the recipe does not sample.
        """
        return None

    @abstractmethod
    def check(self, run: RunContext) -> None:
        """Raise ValueError for invalid settings, before any model is loaded."""

    def check_data(self, run: RunContext) -> None:  # noqa: B027
        """Read the first rows of stored data; raise ValueError if they cannot be used.

        `flowalign check` calls it. Training reads all rows, and reports them.
        """

    def check_context(self) -> None:
        """Check that the recipe supports context parallelism.

        Raises:
            ValueError: The recipe is not tested with `sharding.context_degree`, or needs all tokens
                on one process.
        """
        raise ValueError(
            f"sharding.context_degree was not tested with the recipe {type(self).__name__}; "
            "set it to 1, or take PolicyGradient or Matching"
        )

    @abstractmethod
    def plan(self, run: RunContext, model: ModelPlan, world: int) -> RecipePlan:
        """Return the cost of a step on `world` processes.

        Raises:
            ValueError: The recipe does not fit the number of processes or the model.
        """

    @abstractmethod
    def open(self, run: RunContext, learner: Learner, folder: Path, log: Log) -> Loop:
        """Return the loop, ready for its first step; the models are already loaded.

        `folder` is the run directory.

        Raises:
            ValueError: The data cannot be used for training.
        """


@dataclass(frozen=True, kw_only=True)
class TrainingPrompts:
    """Setting of recipes and data sources that sample the policy for prompts of one file."""

    prompts: str
    """Path of the training prompts: a text file, one prompt per line, or a table (JSONL, JSON, CSV,
    TSV, parquet) with a column `prompt`, plus `image`, `images` or `mask` if the policy takes them.
    `captions.csv:caption` names another column."""

    @property
    def prompt_files(self) -> list[str]:
        """Return the path of the training prompts."""
        return [self.prompts]
