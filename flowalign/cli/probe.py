"""Measure signal and noise of each denoising step's gradient: `flowalign probe`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowalign.cli.options import Parser, add_config, add_processes, read_settings, whole
from flowalign.distributed.launch import Launch, relaunch, starts_others
from flowalign.utils.console import get_log, table
from flowalign.utils.folders import check_file_path, check_folder_path

if TYPE_CHECKING:
    from flowalign.studies.probe.figures import ProbeAnalysis
    from flowalign.studies.probe.measure import OutcomeVariance
    from flowalign.studies.probe.probe_settings import Setting

HELP = "Measure signal and noise of each denoising step's gradient, at fixed weights."


BATCHES = 16
"""Default number of batches."""


def add_arguments(parser: Parser) -> None:
    """Add the run files, the settings to compare, the number of batches, and the outputs."""
    add_config(parser)
    parser.add_argument(
        "--methods",
        nargs="+",
        default=[],
        metavar="FILE",
        help="method files to compare, each added after the run files (default: none)",
    )
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=VALUE,...",
        help="values of a setting to compare; if repeated, all combinations",
    )
    layouts = "layouts to compare, prompts per step x samples per prompt, such as 16x12 8x24"
    parser.add_argument("--layouts", nargs="+", default=[], metavar="PxS", help=layouts)
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument("--weights", metavar="FOLDER", help="saved weights (default: the model's)")
    weights.add_argument(
        "--checkpoint",
        nargs="+",
        default=[],
        metavar="RUN",
        help="run directories or checkpoints to compare; start: the model's own weights",
    )
    parser.add_argument("--batches", type=whole(6, 10_000), help=f"(default: {BATCHES})")
    parser.add_argument(
        "--metric",
        choices=("gradient", "update"),
        default="gradient",
        help="vector that ranks settings and determines step weights: the gradient (default), or "
        "AdamW's update",
    )
    asked = "measure instead, on so many prompts, at which steps siblings pay"
    parser.add_argument("--credit", type=whole(2, 10_000), metavar="PROMPTS", help=asked)
    add_processes(parser)
    parser.add_argument("--overlay", metavar="FILE", help="run file for the recommended settings")
    parser.add_argument("--out", metavar="FOLDER", help="folder for a page and all results as JSON")
    kept = ("batches", "out", "overlay", "metric")
    parser.rules += tuple(f"--credit excludes --{name}: it prints one table" for name in kept)


def run(args: argparse.Namespace) -> int:
    """Print a table for each setting and their comparison, and return 0."""
    from flowalign.studies.probe import figures
    from flowalign.studies.probe.measure import probes
    from flowalign.studies.probe.overlay import write_overlay

    _check_outputs(args)
    found = _build_settings(args)
    _start_others(args, found)
    if args.credit:
        return _show_credit(found, args.credit)
    judged: list[figures.ProbeAnalysis] = []
    for setting, measured in probes(found, args.batches or BATCHES, get_log()):
        if measured is None:
            continue  # not the main process
        judged.append(figures.ProbeAnalysis(setting, measured, args.metric))
        table(setting.name, format_setting(judged[-1]))
        if args.out:
            figures.write_page(Path(args.out), figures.comparison(judged))
    if len(judged) > 1:
        ranks = format_ranks(figures.comparison(judged))
        table("signal to noise per 1000 evaluations, best weights", ranks)
    if judged and args.overlay:
        best, (configs, _) = figures.recommend(judged), read_settings(args)
        weights = figures.recommend_weights(best)
        write_overlay(Path(args.overlay), configs, best.setting, weights)
    return 0


def _check_outputs(args: argparse.Namespace) -> None:
    if args.out:
        check_folder_path(Path(args.out))
    if args.overlay:
        check_file_path(Path(args.overlay), overwrite=True, option="--overlay")


def _start_others(args: argparse.Namespace, found: "list[Setting]") -> None:
    """Run the command in all processes, if it has to start them."""
    from flowalign.distributed.processes import check_fits

    if starts_others(args.processes):
        for setting in found:
            check_fits(args.processes, setting.loaded.run.device)
        relaunch(Launch(args.processes), args.words)


def _show_credit(found: "list[Setting]", prompts: int) -> int:
    """Print for each setting what causes the variance of outcomes, and where siblings pay."""
    from flowalign.studies.probe.measure import open_setting, outcome_variance

    for setting in found:
        measured = outcome_variance(setting.loaded.run, open_setting(setting), prompts)
        if measured is not None:
            table(setting.name, format_credit(measured))
    return 0


def format_credit(found: "OutcomeVariance") -> dict[str, str]:
    """Return the table of variances by step and reward dimension, with the recommended method."""

    def by_dim(values: Sequence[float]) -> str:
        return ", ".join(f"{d} {v:.3g}" for d, v in zip(found.dims, values, strict=True))

    outcome, costs = found.costs
    shown = {"samples of a prompt": by_dim(found.prompt.tolist())}
    rows = zip(found.steps, found.siblings.tolist(), found.gain, costs, strict=True)
    for step, row, gain, cost in rows:
        shown[f"siblings of step {step}"] = (
            f"{by_dim(row)}: gain {gain:.2f}, {cost:.3g} forward passes per transition"
        )
    shown["scorer's error"] = by_dim(found.noise.tolist())
    shown["cost per transition"] = (
        f"outcomes {outcome:.3g} forward passes and {1 / len(found.steps):.2g} reward calls, "
        f"siblings {1 - 1 / found.children:.2g} reward calls; gains leave out reward calls"
    )
    pays = [step for step, gain in zip(found.steps, found.gain, strict=True) if gain > 1]
    shown["recommended"] = (
        f"siblings at steps {pays}: recipe.credit flowalign.credit.MixedAdvantage with "
        "advantages.scale given, and sampling.branching flowalign.sampling.Comb with "
        f"common_noise true, children {found.children} and splits {pays}, and recipe.step_weight "
        f"1 / {found.children} at these steps; as an example, configs/words_siblings.yaml"
        if pays
        else "outcome credit: siblings pay at no step"
    )
    return shown


def _build_settings(args: argparse.Namespace) -> "list[Setting]":
    """Return the settings to compare, checked without reading weights."""
    from flowalign.studies.probe import probe_settings as axis

    configs, overrides = read_settings(args)
    weights = axis.checkpoints(args.checkpoint)
    if args.weights:
        weights = axis.saved_weights(args.weights)
    varied = [axis.vary(text) for text in args.vary]
    axes = [axis.methods(args.methods), *varied, axis.layouts(args.layouts)]
    found = axis.settings(configs, overrides, weights, axes, args.processes)
    if args.metric == "update":
        axis.check_metric(found, args.batches or BATCHES)
    return found


def format_setting(judged: "ProbeAnalysis") -> dict[str, str]:
    """Return the table of one setting: its steps, its weights and its costs."""
    from flowalign.studies.probe.figures import summary

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
