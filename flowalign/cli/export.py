"""Export trained weights for other programs, and publish them: `flowalign export`."""

import argparse
from pathlib import Path

from flowalign.cli.messages import printer
from flowalign.utils.errors import ConfigError

HELP = "Write trained weights for diffusers, PEFT or ComfyUI, or merged; publish them on the hub."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run or checkpoint, the form of its weights, and where they go."""
    add = parser.add_argument
    add("source", metavar="RUN", help="directory of a run (its newest checkpoint), or a checkpoint")
    add(
        "--to",
        choices=("diffusers", "peft", "comfyui", "merged"),
        default="diffusers",
        help="an adapter for one of three programs, or the whole pipeline; default: diffusers",
    )
    add("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="default: fp32")
    add("--out", metavar="FOLDER", help="new folder; default: exports/ and the name of the run")
    add("--live", action="store_true", help="the last weights, and not their average")
    add(
        "--model", metavar="FOLDER", help="folder or hub id of the model that was trained, if moved"
    )
    add("--push-to-hub", metavar="OWNER/NAME", help="publish the folder as a model of this name")
    add("--private", action="store_true", help="publish it for its owner alone")
    add("--license", help="licence of the weights, as the hub names it; needed to publish")


def run(args: argparse.Namespace) -> int:
    """Write the folder, publish it if asked to, and return 0.

    Raises:
        ConfigError: An option, the weights or the hub need a correction by the user.
    """
    from flowalign.runs.export import Form, export, find_trained, prepare
    from flowalign.utils.hub import check_publishing, publish

    log, source = printer(), Path(args.source)
    try:
        if args.push_to_hub:
            _check_license(args.license)
            check_publishing(args.push_to_hub)
        trained = find_trained(source, averaged=not args.live)
        home = trained.run_folder or source
        out = Path(args.out or f"exports/{home.resolve().name}-{args.to}")
        form = Form(args.to, args.dtype, out, args.license)
        difference = export(prepare(trained, form, args.model), trained, form)
        if difference is None:
            log(f"{out} is written from {trained.weights}; no loader of {args.to} was at hand")
        else:
            log(f"{out} is written from {trained.weights}; read back it is off by {difference:.1e}")
        if args.push_to_hub:
            log(f"published: {publish(out, args.push_to_hub, args.private)}")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return 0


def _check_license(license: str | None) -> None:
    if not license:
        raise ValueError(
            "--push-to-hub needs --license: that of the base model binds what was trained from it"
        )
