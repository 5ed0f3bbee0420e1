"""Evaluate the methods of a comparison on a benchmark, all seeds of a method in one command."""

import sys
from collections.abc import Sequence
from pathlib import Path

from flowalign.studies.compare import ComparisonRequest, Log
from flowalign.studies.comparison import BenchmarkLine, Comparison, find_difference, seed_statistics
from flowalign.studies.comparison_page import write_comparison
from flowalign.training.checkpoint import latest
from flowalign.utils.errors import TrainingFailure
from flowalign.utils.files import read_object
from flowalign.utils.subprocesses import CommandJob, run_all


def evaluate_benchmark(
    request: ComparisonRequest, name: str, data: str | None, result: Comparison, log: Log
) -> list[BenchmarkLine]:
    """Evaluate the trained weights of all methods on a benchmark, and add it to the comparison.

    `name` is that of a card, or its path; `data` is the official prompt file, if the card bundles
    no prompts. Finished evaluations are kept.

    Raises:
        TrainingFailure: An evaluation failed.
    """
    methods = [Path(configs[-1]).stem for configs in request.configs]
    folders = {one: request.out / one / f"benchmark-{Path(name).stem}" for one in methods}
    options = ["--benchmark", name, *(["--data", data] if data else [])]
    jobs = [_build_job(options, request.seeds, out) for out in folders.values()]
    if failed := run_all(jobs, 1, log):
        raise TrainingFailure(f"the {failed[0].name} failed, see {failed[0].log}")
    lines = _read_lines(folders)
    write_comparison(request.out, result, benchmark={name: lines})
    return lines


def _build_job(options: Sequence[str], seeds: Sequence[int], out: Path) -> CommandJob:
    """Return the command that evaluates the last weights of a method's runs together.

    It takes the settings of the first run from its folder: overrides of training, such as
    --num_steps, have another meaning for `flowalign eval`.

    Raises:
        ValueError: A run has no checkpoint.
    """
    runs = [out.parent / f"seed{seed}" for seed in seeds]
    command = [sys.executable, "-m", "flowalign", "eval", str(runs[0] / "config.yaml"), *options]
    command += ["--out", str(out)]
    for run in runs:
        checkpoint = latest(run / "checkpoints")
        if checkpoint is None:
            raise ValueError(f"{run} has no checkpoint to evaluate on a benchmark")
        # The average is what the last evaluation of the run used.
        average = checkpoint / "ema"
        command += ["--weights", str(average if average.is_dir() else checkpoint)]
    return CommandJob(f"benchmark of {out.parent.name}", command, out.with_name(f"{out.name}.log"))


def _read_lines(folders: dict[str, Path]) -> list[BenchmarkLine]:
    """Return the numbers of all methods, given the results folder of each; the baseline first."""
    read = {name: read_object(at / "results.json") for name, at in folders.items()}
    first, *others = read
    lines = []
    for k, line in enumerate(read[first]["lines"]):
        scores = {name: [one["value"] for one in read[name]["lines"][k]["scores"]] for name in read}
        methods = {name: seed_statistics(values[1:]) for name, values in scores.items()}
        differences = {n: find_difference(methods[n].values, methods[first].values) for n in others}
        label = f"{line['metric']}: {line['group']}" if line["group"] else line["metric"]
        lines.append(BenchmarkLine(label, scores[first][0], methods, differences))
    return lines
