"""Measure signal and noise of each denoising step's gradient."""

import argparse
import json
from pathlib import Path
from typing import Any

from flowalign.cli.commands.common import get_log, read_settings, starts_others
from flowalign.distributed.launch import Launch, relaunch
from flowalign.distributed.processes import check_fits
from flowalign.reports.probe_page import page
from flowalign.studies.probe.figures import (
    ProbeAnalysis,
    comparison,
    recommend,
    recommend_weights,
    summary,
)
from flowalign.studies.probe.measure import probes
from flowalign.studies.probe.overlay import write_overlay
from flowalign.studies.probe.probe_settings import (
    Setting,
    check_metric,
    checkpoints,
    layouts,
    methods,
    saved_weights,
    settings,
    vary,
)
from flowalign.utils.console import table
from flowalign.utils.errors import convert_value_errors
from flowalign.utils.files import write_text
from flowalign.utils.folders import check_file_path, check_folder_path


@convert_value_errors()
def run(args: argparse.Namespace) -> int:
    """Print a table for each setting and their comparison, and return 0."""
    _check_outputs(args)
    settings = _build_settings(args)
    if starts_others(args.processes):
        for setting in settings:
            check_fits(args.processes, setting.loaded.run.device)
        relaunch(Launch(args.processes), args.words)
    judged: list[ProbeAnalysis] = []
    for setting, measured in probes(settings, args.batches, get_log()):
        if measured is None:
            continue  # not the main process
        judged.append(ProbeAnalysis(setting, measured, args.metric))
        table(setting.name, format_setting(judged[-1]))
        if args.out:
            _write_page(Path(args.out), comparison(judged))
    if len(judged) > 1:
        table(
            "signal to noise per 1000 evaluations, best weights", format_ranks(comparison(judged))
        )
    if judged and args.overlay:
        best = recommend(judged)
        configs, _ = read_settings(args)
        write_overlay(Path(args.overlay), configs, best.setting, recommend_weights(best))
    return 0


def _check_outputs(args: argparse.Namespace) -> None:
    if args.out:
        check_folder_path(Path(args.out))
    if args.overlay:
        check_file_path(Path(args.overlay), overwrite=True, option="--overlay")


def _build_settings(args: argparse.Namespace) -> list[Setting]:
    """Return the settings to compare, checked without reading weights."""
    configs, overrides = read_settings(args)
    weights = saved_weights(args.weights) if args.weights else checkpoints(args.checkpoint)
    axes = [methods(args.methods), *(vary(text) for text in args.vary), layouts(args.layouts)]
    found = settings(configs, overrides, weights, axes, args.processes)
    if args.metric == "update":
        check_metric(found, args.batches)
    return found


def _write_page(folder: Path, figures: dict[str, Any]) -> None:
    """Write the measurements so far and their page."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "probe.json", json.dumps(figures, indent=1, allow_nan=False) + "\n")
    write_text(folder / "index.html", page(folder.resolve().name, figures))


def format_setting(judged: ProbeAnalysis) -> dict[str, str]:
    """Return the table of one setting: its steps, its weights and its costs."""
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
        f"active in {clip['share']:.0%} of the batches: max_grad_norm is "
        f"{clip['max_grad_norm']:g}, gradient norm {clip['norm']:.3g} ± {clip['norm_std']:.2g}"
    )
    return shown | {name: f"{value:g} a batch" for name, value in found["a_batch"].items()}


def format_ranks(found: dict[str, Any]) -> dict[str, str]:
    """Return the table of the comparison: the order, and the significance of each difference."""
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
            f"at the second, step weights of the first reach {row['kept']['value']:.4f}, "
            f"its own {row['renewed']['value']:.4f}: a gain of "
            f"{row['gain']['value']:.2g} ± {row['gain']['error']:.2g}"
        )
    return shown
