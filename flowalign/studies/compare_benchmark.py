"""Evaluate the methods of a comparison on a benchmark, all seeds of a method in one command."""

import sys
from collections.abc import Sequence
from pathlib import Path

from flowalign.studies.compare import Benchmark, ComparisonRequest, Log
from flowalign.studies.comparison import BenchmarkLine, Comparison, find_difference, seed_statistics
from flowalign.studies.comparison_page import write_comparison
from flowalign.training.checkpoint_files import latest
from flowalign.utils.errors import TrainingFailure
from flowalign.utils.files import read_object
from flowalign.utils.subprocesses import CommandJob, run_all


def evaluate_benchmark(
    request: ComparisonRequest, result: Comparison, log: Log
) -> list[BenchmarkLine]:
    """Evaluate the trained weights of all methods on the benchmark, and add it to the comparison.

    Finished evaluations are kept.

    Raises:
        TrainingFailure: An evaluation failed.
    """
    assert request.benchmark is not None
    stem = f"benchmark-{Path(request.benchmark.name).stem}"
    folders = {Path(c[-1]).stem: request.out / Path(c[-1]).stem / stem for c in request.configs}
    jobs = []
    for out in folders.values():
        runs = [out.parent / f"seed{seed}" for seed in request.seeds]
        jobs.append(build_job(request.benchmark, runs, out))
    if failed := run_all(jobs, 1, log):
        raise TrainingFailure(f"the {failed[0].name} failed, see {failed[0].log}")
    lines = read_lines(folders)
    write_comparison(request.out, result, benchmark={request.benchmark.name: lines})
    return lines


def build_job(benchmark: Benchmark, runs: Sequence[Path], out: Path) -> CommandJob:
    """Return the command that evaluates the last weights of a method's runs together.

    It takes the settings of the first run from its folder: overrides of training, such as
    --num_steps, have another meaning for `flowalign eval`.

    Raises:
        ValueError: A run has no checkpoint.
    """
    command = [sys.executable, "-m", "flowalign", "eval", str(runs[0] / "config.yaml")]
    command += ["--benchmark", benchmark.name, "--out", str(out)]
    command += ["--data", benchmark.data] if benchmark.data else []
    for run in runs:
        command += ["--weights", str(find_weights(run))]
    return CommandJob(f"benchmark of {out.parent.name}", command, out.with_name(f"{out.name}.log"))


def find_weights(run: Path) -> Path:
    """Return the weights that the last evaluation of a run used: the average if there is one."""
    checkpoint = latest(run / "checkpoints")
    if checkpoint is None:
        raise ValueError(f"{run} has no checkpoint to evaluate on a benchmark")
    return checkpoint / "ema" if (checkpoint / "ema").is_dir() else checkpoint


def read_lines(folders: dict[str, Path]) -> list[BenchmarkLine]:
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
