"""Measure signal and noise of each denoising step's gradient: `flowalign probe`."""

import argparse
import json
from pathlib import Path

from flowalign.cli.messages import add_config, printer, settings_of
from flowalign.cli.ranges import whole

HELP = "Measure signal and noise of each denoising step's gradient, at fixed weights."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run files, the methods to compare, and the number of batches."""
    add_config(parser)
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="FILE",
        help="run files of methods, each put after the others; default: the run as it is",
    )
    parser.add_argument("--weights", metavar="FOLDER", help="saved weights; default: the model's")
    parser.add_argument("--batches", type=whole(4, 10_000), default=16, help="default: 16")
    parser.add_argument(
        "--overlay", metavar="FILE", help="write the best weights of the steps as a run file"
    )
    parser.add_argument("--out", metavar="FILE", help="write all figures as JSON")


def run(args: argparse.Namespace) -> int:
    """Print a table for each method, and return 0.

    Raises:
        ConfigError: The run files or the weights need a correction by the user.
    """
    from flowalign.runs.config import load
    from flowalign.runs.probe import probe
    from flowalign.utils.console import table
    from flowalign.utils.errors import ConfigError
    from flowalign.utils.files import write_text

    if args.overlay and len(args.methods or ()) > 1:
        raise ConfigError("--overlay is of one run; give it without --methods, or with one")
    configs, overrides = settings_of(args)
    names = args.methods or [None]
    runs = [load([*configs, *([name] if name else [])], overrides)[0] for name in names]
    found = {}
    for name, run_file in zip(names, runs, strict=True):
        title = Path(name).stem if name else " ".join(configs)
        try:
            result = probe(run_file, args.batches, args.weights, printer()).summary()
        except ValueError as error:
            raise ConfigError(str(error)) from error
        found[title] = result
        table(title, rows(result))
        if args.overlay:
            write_text(Path(args.overlay), overlay(result))
        if args.out:
            write_text(Path(args.out), json.dumps(found, indent=2) + "\n")
    return 0


def overlay(result: dict) -> str:
    """Return a run file with the best weights, to be put after the others.

    Raises:
        ConfigError: No step showed a signal.
    """
    from flowalign.utils.errors import ConfigError

    if not any(result["step_weight"]):
        raise ConfigError("no step showed a signal, so there are no weights: give more --batches")
    return (
        f"# From {result['batches']} batches of flowalign probe.\n"
        f"recipe:\n  init_args:\n    step_weight: {result['step_weight']}\n"
    )


def rows(result: dict) -> dict[str, str]:
    """Return what a person reads of one method: its steps, its weights and its costs."""
    shown = {
        f"step {step['step']}": f"signal {step['signal']:.3g} ± {step['signal_error']:.2g}, "
        f"noise {step['noise']:.3g}, weight {step['weight']:.2f}, best {step['best_weight']:.2f}"
        for step in result["steps"]
    }
    for name, row in result["weights"].items():
        error = f" ± {row['error']:.2g}" if "error" in row else ""
        shown[f"signal to noise, {name}"] = (
            f"{row['signal_to_noise']:.4f}{error}, "
            f"per 1000 evaluations {row['per_1000_evaluations']:.4f}"
        )
    return shown | {name: f"{value:g} a batch" for name, value in result["a_batch"].items()}
