"""Define the interface of a kind of training: a recipe, which opens the loop of a run."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flowalign.rewards.checked import OnFailure
from flowalign.rewards.composite import Rewards
from flowalign.training.learner import Learner, Optimizer
from flowalign.types import ModelPlan, Policy, PromptConditioning

Log = Callable[[str], None]
"""Shows a person one message."""
Stage = Literal["always", "encoding", "sampling", "updating", "verifying", "main"]
"""Stage of a run in which memory is taken. "always": throughout. "main": main memory, not the
device."""


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Holds what a recipe needs to know of the run file that it stands in."""

    policy: Policy
    """Model that is trained."""
    rewards: Rewards
    """Reward models with their weights."""
    num_steps: int
    """Steps of the loop in the whole run."""
    seed: int = 0
    """Seed of every random draw of the run."""
    evaluates: bool = False
    """Whether the run evaluates at all."""
    evaluate_every: int = 0
    """Steps between evaluations; 0 evaluates before the first step and after the last only."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    """Optimizer of the policy."""
    has_ema: bool = False
    """Whether the run keeps averaged weights."""
    conditioning: PromptConditioning | None = None
    """Words that the policy is asked with. None: it is asked by prompts alone."""

    def check_conditioning(self) -> None:
        """Raise ValueError for words of dimensions that no reward of the run gives."""
        if self.conditioning:
            weights = zip(self.rewards.dims, self.rewards.weights.tolist(), strict=True)
            self.conditioning.check(self.policy, dict(weights))


@dataclass(frozen=True)
class MemoryPart:
    """Estimates the memory that one purpose takes on one process."""

    name: str
    """Purpose, as the plan names it."""
    num_bytes: int
    """Bytes at the peak."""
    stage: Stage = "always"
    """Stage of the run in which the memory is taken."""
    savings: Mapping[str, int] = field(default_factory=dict)
    """Bytes that each setting alone would save, by setting: "recipe.micro_batch: 1"."""


@dataclass(frozen=True, kw_only=True)
class RecipePlan:
    """Describes what one step of a recipe does and takes, known before any weight is read."""

    rows: Mapping[str, str]
    """Rows of the plan table."""
    parts: Sequence[MemoryPart] = ()
    """Parts of the memory that a step takes."""
    evaluations_per_example: int = 1
    """Network evaluations with gradient for one element of a micro-batch."""
    decode_batches: Mapping[str, int] = field(default_factory=dict)
    """Settings that bound how many samples are decoded at once, and their values."""
    weight_copies: int = 0
    """Copies of the trained weights that are kept beside optimizer and average."""


class Loop(ABC):
    """Started training. Evaluation, checkpoints and logs are the caller's."""

    @abstractmethod
    def run(self, steps: Iterable[int]) -> Iterator[dict[str, float]]:
        """Make these steps, yielding the metrics of each."""

    def evaluate(self) -> dict[str, float]:
        """Return metrics that only this kind of training has; by default none.

        The rewards of held-out prompts are measured elsewhere.
        """
        return {}

    def draw(self) -> float:
        """Write figures of the last step, if any. Returns the seconds spent."""
        return 0.0

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold for this loop, as JSON values."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: B027 (most draws follow the seed)
        """Restore the values of `state`. Called before `run`."""


class Recipe(ABC):
    """Configures one kind of training: the component `recipe` of a run file."""

    micro_batch: int
    """Elements of one forward and backward pass."""
    on_failed_reward: OnFailure
    """Whether a reward that could not be computed ends the run, or drops samples."""

    @property
    def open_files(self) -> Sequence[str]:
        """Return the files of the run directory that `open` writes, and goes on with if killed."""
        return ()

    @property
    @abstractmethod
    def prompt_files(self) -> Sequence[str]:
        """Return the files whose prompts are sampled for training."""

    @property
    def updates(self) -> int:
        """Return the number of optimizer updates of one step of the loop."""
        return 1

    @property
    @abstractmethod
    def examples_per_step(self) -> int:
        """Return the trajectories, pairs or samples of a step at most, over all processes."""

    @property
    def sampler(self) -> tuple[int, int] | None:
        """Return denoising steps and samples per network call of training.

        None if this kind of training samples nothing.
        """
        return None

    @abstractmethod
    def check(self, run: RunContext) -> None:
        """Raise ValueError for settings that no run can use, before any weight is read."""

    def check_context(self) -> None:
        """Check that processes may compute the samples of this recipe together.

        Raises:
            ValueError: `sharding.context_degree` was not tested with it, or it needs whole tokens.
        """
        raise ValueError(
            f"sharding.context_degree was not tested with the recipe {type(self).__name__}; "
            "set it to 1, or take PolicyGradient or Matching"
        )

    @abstractmethod
    def plan(self, run: RunContext, model: ModelPlan, world: int) -> RecipePlan:
        """Return what a step on `world` processes does and takes.

        Raises:
            ValueError: That many processes, or this model, cannot run the recipe.
        """

    @abstractmethod
    def open(self, run: RunContext, learner: Learner, folder: Path, log: Log) -> Loop:
        """Prepare everything that the first step needs, with the weights loaded.

        `folder` is the run directory.

        Raises:
            ValueError: The data of this recipe cannot be trained on.
        """


def check_prompts_per_step(key: str, prompts_per_step: int, world: int) -> None:
    """Raise ValueError if a step has too few prompts for each process to sample one.

    `key` names the settings in run files.
    """
    if prompts_per_step < world:
        raise ValueError(
            f"{key}.prompts_per_step is {prompts_per_step}, fewer than the {world} processes"
        )


def samples_row(prompts_per_step: int, samples_per_prompt: int) -> dict[str, str]:
    """Return the row of the plan table about the samples of a step."""
    total = prompts_per_step * samples_per_prompt
    return {"samples per step": f"{total} = {prompts_per_step} prompts x {samples_per_prompt}"}


def evaluations_row(
    counts: Mapping[str, int | float], name: str = "network evaluations per step"
) -> dict[str, str]:
    """Return the row of the plan table about network evaluations, given them by purpose."""
    shown = {k: f"{n:g}" if isinstance(n, float) else f"{n}" for k, n in counts.items() if n}
    return {name: " + ".join(f"{count} {purpose}" for purpose, count in shown.items())}
