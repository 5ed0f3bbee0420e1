"""Write the rows of the plan table that several recipes share."""

from collections.abc import Mapping, Sequence

from flowalign.types import RewardModel


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
