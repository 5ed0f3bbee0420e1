"""Evaluate a run file's model, or trained weights of it, on its held-out prompts."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from flowalign.distributed.processes import check_fits
from flowalign.runs.config import Run
from flowalign.runs.policy_setup import check_world
from flowalign.runs.run_directory import find_latest
from flowalign.training import checkpoint
from flowalign.training.divergence import list_encoders, measure_distance
from flowalign.training.held_out_evaluation import Evaluation, evaluate
from flowalign.utils.errors import convert_value_errors


def check_weights(folder: Path) -> None:
    """Raise ValueError if a folder is no checkpoint, before the model is loaded."""
    checkpoint.require_weights(folder)
    if newest := find_latest(folder):
        raise ValueError(f"--weights {folder} is a run directory; its newest weights: {newest}")
    if not any(path.is_file() for path in folder.rglob("*")):
        raise ValueError(f"--weights {folder} is a folder without files")
    with convert_value_errors("--weights: "):
        checkpoint.check_weights(folder)


def check_processes(run: Run, prompts: int, processes: int) -> None:
    """Raise ValueError if there are too few cores, GPUs or prompts for the processes."""
    check_fits(processes, run.device)
    check_world(run.sharding, processes)
    if prompts < run.sharding.groups(processes):
        raise ValueError(
            f"--processes is {processes}, but evaluation has {prompts} samples; "
            f"give at most {prompts * run.sharding.context_degree}"
        )


def evaluate_weights(
    run: Run, cfg: Evaluation, weights: str | None, distance: bool
) -> dict[str, float] | None:
    """Load the model, and return its metrics; None on all processes except the main one.

    `distance` adds the distances to samples without the weights.

    Raises:
        ValueError: Models or weights cannot be used.
    """
    processes = run.join(run.sharding.context_degree)
    rewards = run.build_rewards(ranks=processes)
    run.load_rewards(rewards)
    run.load_policy(processes)
    sampled = cfg, processes, run.conditioning
    base: Mapping[str, Tensor] = {}
    if distance:
        encoders = replace(rewards, models=list_encoders(rewards.models), weight_of={})
        base = evaluate(run.policy, encoders, *sampled).features
    if weights:
        run.policy.load_weights(weights)
    result = evaluate(run.policy, rewards, *sampled)
    requests = [request for _, request in cfg.items()]
    metrics = {**result.metrics, **measure_distance(base, result.features, requests)}
    return metrics if processes.is_main else None
