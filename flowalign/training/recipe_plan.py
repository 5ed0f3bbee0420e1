"""Define the plan of a recipe, and the rows of the plan table that several recipes share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Work of one step on all processes together. Upper bounds where the plan says "at most"."""

    sampling: int | float = 0
    """Network evaluations that sample."""
    completing: int | float = 0
    """Network evaluations that complete intermediate states."""
    training: int | float = 0
    """Network evaluations of the update with a backward pass."""
    frozen: int | float = 0
    """Network evaluations of the update without gradient, such as those of a reference."""
    decodes: int | float = 0
    """Decoded samples and completions."""
    reward_calls: int | float = 0
    """Scores of one sample by one reward model."""
    differentiates_rewards: bool = False
    """Whether decoding and rewards have a backward pass."""


@dataclass(frozen=True, kw_only=True)
class RecipePlan:
    """Cost of one step of a recipe, computed before any model is loaded."""

    rows: Mapping[str, str]
    """Rows of the plan table."""
    parts: Sequence[MemoryPart] = ()
    """Parts of the memory of a step."""
    evaluations_per_example: int = 1
    """Number of network evaluations with gradient per element of a micro-batch."""
    decode_batches: Mapping[str, int] = field(default_factory=dict)
    """Settings that limit the number of samples per decode, with their values."""
    weight_copies: int = 0
    """Number of copies of the trained weights in addition to optimizer and average."""
    prompts_per_step: int = 0
    """Number of sampled prompts per step. 0: none."""
    work: StepWork = field(default_factory=StepWork)
    """Work of a step, as in `rows`."""


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


def reward_rows(models: Sequence[RewardModel], group_sizes: Sequence[int]) -> dict[str, str]:
    """Return the rows of the plan table about rewards; `group_sizes` are numbers of samples."""
    costs = [model.judge_calls(group_sizes) for model in models]
    answers, tokens = (sum(each) for each in zip(*costs, strict=True)) if costs else (0, 0)
    judges = f"{answers:,}, of at most {tokens:,} tokens together"
    return {
        "reward calls per step": f"{sum(group_sizes) * len(models)}",
        **({"judge answers per step": judges} if answers else {}),
    }


def evaluations_row(
    counts: Mapping[str, int | float], name: str = "network evaluations per step"
) -> dict[str, str]:
    """Return the row of the plan table about network evaluations, from counts by purpose."""
    shown = {k: f"{n:g}" if isinstance(n, float) else f"{n}" for k, n in counts.items() if n}
    return {name: " + ".join(f"{count} {purpose}" for purpose, count in shown.items())}
