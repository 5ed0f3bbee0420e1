"""Measure signal and noise of each denoising step's gradient: `flowalign probe`."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowalign.cli.messages import (
    UsageError,
    add_config,
    add_processes,
    printer,
    settings_of,
    starts_others,
)
from flowalign.cli.ranges import whole

if TYPE_CHECKING:
    from flowalign.runs.probe_figures import Judged
    from flowalign.runs.probe_settings import Setting

HELP = "Measure signal and noise of each denoising step's gradient, at fixed weights."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run files, what to compare, the number of batches, and what to write."""
    add_config(parser)
    parser.add_argument(
        "--methods",
        nargs="+",
        default=[],
        metavar="FILE",
        help="run files of methods, each put after the others; default: the run as it is",
    )
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=VALUE,...",
        help="values of a setting to compare; repeated, all combinations",
    )
    parser.add_argument(
        "--layouts",
        nargs="+",
        default=[],
        metavar="PxS",
        help="prompts of a step x samples of a prompt to compare, such as 16x12 8x24",
    )
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument("--weights", metavar="FOLDER", help="saved weights; default: the model's")
    weights.add_argument(
        "--checkpoint",
        nargs="+",
        default=[],
        metavar="RUN",
        help="run directories or checkpoints to compare, or start: the model's own weights",
    )
    parser.add_argument("--batches", type=whole(6, 10_000), default=16, help="default: 16")
    parser.add_argument(
        "--metric",
        choices=("gradient", "update"),
        default="gradient",
        help="what ranks settings and finds weights: the gradient (default), or the update that "
        "AdamW makes of it",
    )
    add_processes(parser)
    parser.add_argument("--overlay", metavar="FILE", help="write what is recommended as a run file")
    parser.add_argument("--out", metavar="FOLDER", help="write a page and all figures as JSON")


def run(args: argparse.Namespace) -> int:
    """Print a table for each setting and their comparison, and return 0.

    Raises:
        ConfigError: The run files, the axes or the weights need a correction by the user.
    """
    from flowalign.runs.probe import probes
    from flowalign.runs.probe_figures import Judged, comparison, recommended, recommended_weights
    from flowalign.runs.probe_overlay import write_overlay
    from flowalign.utils.console import table
    from flowalign.utils.errors import ConfigError

    settings = _settings(args)
    if starts_others(args.processes):
        _start_others(settings, args)
    judged: list[Judged] = []
    try:
        for setting, found in probes(settings, args.batches, printer()):
            if found is None:
                continue  # on all but the main process
            judged.append(Judged(setting, found, args.metric))
            table(setting.name, rows(judged[-1]))
            if args.out:
                _write(Path(args.out), comparison(judged))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if judged and len(judged) > 1:
        table("signal to noise per 1000 evaluations, best weights", ranks(comparison(judged)))
    if judged and args.overlay:
        best = recommended(judged)
        configs, _ = settings_of(args)
        write_overlay(Path(args.overlay), configs, best.setting, recommended_weights(best))
    return 0


def _settings(args: argparse.Namespace) -> "list[Setting]":
    """Return what is compared, checked without reading weights."""
    from flowalign.runs.probe_settings import (
        check_metric,
        checkpoints,
        layouts,
        methods,
        saved_weights,
        settings,
        vary,
    )

    configs, overrides = settings_of(args)
    weights = saved_weights(args.weights) if args.weights else checkpoints(args.checkpoint)
    axes = [methods(args.methods), *(vary(text) for text in args.vary), layouts(args.layouts)]
    found = settings(configs, overrides, weights, axes, args.processes)
    if args.metric == "update":
        check_metric(found, args.batches)
    return found


def _start_others(settings: "Sequence[Setting]", args: argparse.Namespace) -> None:
    from flowalign.distributed.launch import relaunch
    from flowalign.distributed.processes import check_fits

    try:
        for setting in settings:
            check_fits(args.processes, setting.loaded.run.device)
    except ValueError as error:
        raise UsageError(str(error)) from error
    relaunch(args.processes, args.words)


def _write(folder: Path, found: dict[str, Any]) -> None:
    """Write the figures so far and their page."""
    from flowalign.reports.probe_page import page
    from flowalign.utils.files import write_text

    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "probe.json", json.dumps(found, indent=1, allow_nan=False) + "\n")
    write_text(folder / "index.html", page(folder.resolve().name, found))


def rows(judged: "Judged") -> dict[str, str]:
    """Return what a person reads of one setting: its steps, its weights and its costs."""
    from flowalign.runs.probe_figures import summary

    found = summary(judged.setting, judged.probe)
    other = "update" if judged.metric == "gradient" else "gradient"
    shown = {
        f"step {step['step']}": f"signal {step['signal']:.3g} ± {step['signal_error']:.2g}, "
        f"noise {step['noise']:.3g}, weight {step['weight']:.2f}, best {step['best_weight']:.2f}"
        for step in found[judged.metric]["steps"]
    }
    for name, row in found[judged.metric]["signal_to_noise"].items():
        shown[name] = (
            f"signal to noise {row['value']:.4f} ± {row['error']:.2g}, "
            f"per 1000 evaluations {row['per']['network_evaluations']:.4f}"
        )
    for name, row in (found[other] or {"signal_to_noise": {}})["signal_to_noise"].items():
        shown[f"{other}, {name}"] = f"signal to noise {row['value']:.4f} ± {row['error']:.2g}"
    clip = found["clip"]
    shown["clip"] = (
        f"acts on {clip['share']:.0%} of the batches: max_grad_norm is "
        f"{clip['max_grad_norm']:g}, their norm {clip['norm']:.3g} ± {clip['norm_std']:.2g}"
    )
    return shown | {name: f"{value:g} a batch" for name, value in found["a_batch"].items()}


def ranks(found: dict[str, Any]) -> dict[str, str]:
    """Return what a person reads of the comparison: the order, and which differences count."""
    shown = {}
    for row in found["ranking"]:
        figure, behind = row["per_1000_evaluations"], row["behind"]
        shown[row["name"]] = f"{figure['value']:.4f} ± {figure['error']:.2g}"
        if behind:
            far = "within the error" if row["within_error"] else "beyond the error"
            gap = f"{behind['value']:.2g} ± {behind['error']:.2g}"
            shown[row["name"]] += f", {gap} behind the first: {far}"
    for row in found["drift"]:
        shown[f"{row['from']} -> {row['to']}"] = (
            f"weights of steps found at the first are worth {row['kept']['value']:.4f} at the "
            f"second, those found there {row['renewed']['value']:.4f}, "
            f"{row['gain']['value']:.2g} ± {row['gain']['error']:.2g} more"
        )
    return shown
