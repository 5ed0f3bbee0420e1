"""Define the interface of recipes, which configure a kind of training, and their plans."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from flowalign.rewards.checked import OnFailure
from flowalign.rewards.composite import Rewards
from flowalign.training.learner import Learner, Optimizer
from flowalign.types import ModelPlan, Policy, PromptConditioning, Request, RewardModel

Stage = Literal["always", "encoding", "sampling", "updating", "verifying", "main"]
"""Stage of a run in which memory is used. always: in all stages. main: main memory instead of
device memory."""


@dataclass(frozen=True)
class MemoryPart:
    """Estimated memory for one purpose on one process."""

    name: str
    """Purpose, as shown in the plan."""
    num_bytes: int
    """Peak size in bytes."""
    stage: Stage = "always"
    """Stage of the run in which the memory is used."""
    savings: Mapping[str, int] = field(default_factory=dict)
    """Bytes that a single change of setting would save, by setting: "recipe.micro_batch: 1"."""


Counts = Mapping[str, int | float]
"""Numbers of network evaluations by purpose."""
EvaluationKind = Literal["sampling", "completing", "training", "frozen"]
"""Kind of network evaluations. sampling, completing: of samples, and of intermediate states.
training: of the update, with a backward pass. frozen: of the update, without gradient."""


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Work of one step on all processes together."""

    evaluations: Counts = field(default_factory=dict)
    """Network evaluations by purpose. A purpose starts with its kind, except for the kind frozen:
    "training the fake score", but "reference"."""
    decodes: int = 0
    """Decoded samples and completions."""
    reward_calls: int = 0
    """Scores of one sample by one reward model."""
    differentiates_rewards: bool = False
    """Whether decoding and rewards have a backward pass."""
    bounds: Set[Literal["evaluations", "decodes"]] = frozenset()
    """Counts that are upper bounds, because rewards or random draws choose what is done. decodes:
    of decodes and reward calls."""

    def count(self, kind: EvaluationKind) -> int | float:
        """Return the number of network evaluations of one kind."""
        return sum(n for name, n in self.evaluations.items() if _kind(name) == kind)

    def of_update(self, passes: int | float) -> int | float:
        """Return the evaluations of the update; one with a backward pass counts `passes` times."""
        return self.count("training") * passes + self.count("frozen")

    def plus(self, evaluations: Counts, at_most: bool = False) -> "StepWork":
        """Return the work with further network evaluations."""
        bounds = self.bounds | ({"evaluations"} if at_most else set())
        return replace(self, evaluations={**self.evaluations, **evaluations}, bounds=bounds)

    def rows(self) -> dict[str, str]:
        """Return the rows of the plan table; none for work that was not counted."""
        counts = [f"{n:.12g} {purpose}" for purpose, n in self.evaluations.items() if n]
        most = "at most " * ("evaluations" in self.bounds)
        rows = {"network evaluations per step": most + " + ".join(counts)} if counts else {}
        if self.decodes:
            most = "at most " * ("decodes" in self.bounds)
            gradient = ", with gradient" * self.differentiates_rewards
            rows["decodes per step"] = f"{most}{self.decodes}{gradient}"
            rows["reward calls per step"] = f"{most}{self.reward_calls}"
        return rows


def _kind(purpose: str) -> str:
    first = purpose.split()[0]
    return first if first in ("sampling", "completing", "training") else "frozen"


@dataclass(frozen=True, kw_only=True)
class RecipePlan:
    """Cost of one step of a recipe, computed before any model is loaded."""

    rows: Mapping[str, str]
    """Rows of the plan table, without those of `work`."""
    parts: Sequence[MemoryPart] = ()
    """Parts of the memory of a step."""
    evaluations_per_example: int = 1
    """Number of network evaluations with gradient per element of a micro-batch."""
    graphs: int = 0
    """Number of network evaluations of a process whose graphs the rollout keeps for the update, or
    could keep without `keeps_graphs`."""
    keeps_graphs: bool = False
    decode_batch: int = 0
    """Largest number of samples that are decoded together."""
    weight_copies: int = 0
    """Number of copies of the trained weights in addition to optimizer and average."""
    prompts_per_step: int = 0
    """Number of sampled prompts per step. 0: none."""
    work: StepWork = field(default_factory=StepWork)
    """Work of a step, which has further rows of the plan table."""
    once: StepWork = field(default_factory=StepWork)
    """Work before the first step."""


def check_prompts_per_step(key: str, prompts_per_step: int, world: int) -> None:
    """Raise ValueError if a step has fewer prompts than processes.

    `key` is the key of the settings in run files.
    """
    if prompts_per_step < world:
        raise ValueError(
            f"{key}.prompts_per_step is {prompts_per_step}, fewer than the {world} processes"
        )


def samples_row(prompts_per_step: int, samples_per_prompt: int) -> dict[str, str]:
    """Return the row of the plan table about the samples of a step."""
    total = prompts_per_step * samples_per_prompt
    return {"samples per step": f"{total} = {prompts_per_step} prompts x {samples_per_prompt}"}


def judge_row(models: Sequence[RewardModel], group_sizes: Sequence[int]) -> dict[str, str]:
    """Return the row of the plan table about judges, if there are any, for groups of samples."""
    costs = [model.judge_calls(group_sizes) for model in models]
    answers, tokens = (sum(each) for each in zip(*costs, strict=True)) if costs else (0, 0)
    judges = f"{answers:,}, of at most {tokens:,} tokens together"
    return {"judge answers per step": judges} if answers else {}


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

    def check_conditioning(self) -> bool:
        """Return whether the conditioning trains each prompt on its own rewards.

        Raises:
            ValueError: It uses dimensions without a reward.
        """
        if not self.conditioning:
            return False
        weights = zip(self.rewards.dims, self.rewards.weights.tolist(), strict=True)
        self.conditioning.check(self.policy, dict(weights))
        asked = self.conditioning.for_rollout(Request("a prompt"), 0).conditioned
        return bool(asked and asked.dims)

    def check_weights(self, key: str, weights: str) -> None:
        """Raise ValueError if a setting chooses averaged weights that the run does not keep."""
        if weights == "ema" and not self.has_ema:
            raise ValueError(f"{key} is ema, but ema is null; set ema, or policy")


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
