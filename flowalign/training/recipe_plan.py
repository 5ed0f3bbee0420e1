"""Define the plan of a recipe, and the rows of the plan table that several recipes share."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Literal

from flowalign.types import RewardModel

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
