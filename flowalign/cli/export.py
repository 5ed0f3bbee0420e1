"""Export trained weights for other programs, and publish them: `flowalign export`."""

import argparse
from pathlib import Path

from flowalign.cli.options import Parser
from flowalign.utils.console import get_log, table

HELP = "Export trained weights for diffusers, PEFT or ComfyUI, or merged; publish them on the hub."


def add_arguments(parser: Parser) -> None:
    """Add the run or checkpoint, the export format, and the output options."""
    add = parser.add_argument
    add("source", metavar="RUN", help="run directory (its newest checkpoint), or a checkpoint")
    add(
        "--to",
        choices=("diffusers", "peft", "comfyui", "merged"),
        default="diffusers",
        help="LoRA adapter for a program, or the whole pipeline, merged (default: diffusers)",
    )
    add(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="dtype of the weights (default: fp32)",
    )
    add("--out", metavar="FOLDER", help="new folder (default: exports/ and the name of the run)")
    add("--live", action="store_true", help="export the last weights instead of their average")
    add(
        "--benchmark",
        action="append",
        metavar="FOLDER",
        help="output folder of `flowalign eval --benchmark` for the model card; repeatable",
    )
    add("--model", metavar="FOLDER", help="folder or hub id of the trained model, if it has moved")
    add("--push-to-hub", metavar="OWNER/NAME", help="publish the folder as a model of this name")
    add("--dry-run", action="store_true", help="list what --push-to-hub would publish, offline")
    add("--private", action="store_true", help="publish as a private model")
    add("--license", help="licence of the weights, by its hub id; required to publish")
    parser.rules += (
        "--dry-run needs --push-to-hub OWNER/NAME",
        "--push-to-hub needs --license: the licence of the base model binds the trained weights",
    )


def run(args: argparse.Namespace) -> int:
    """Write the folder, publish it if asked to, and return 0."""
    from flowalign.runs.export_weights import export, find_trained, prepare
    from flowalign.runs.model_card import Form, read_benchmarks
    from flowalign.utils.hub import check_name, check_publishing, publish

    log, source = get_log(), Path(args.source)
    if args.push_to_hub:
        check_name(args.push_to_hub)
        if not args.dry_run:
            check_publishing(args.push_to_hub)
    trained = find_trained(source, averaged=not args.live)
    home = trained.run_folder or source
    out = Path(args.out or f"exports/{home.resolve().name}-{args.to}")
    benchmarks = read_benchmarks(args.benchmark or (), trained.weights)
    form = Form(args.to, args.dtype, out, args.license, benchmarks)
    difference = export(prepare(trained, form, args.model), trained, form)
    if difference is None:
        log(f"{out} is written from {trained.weights}; not verified, no loader of {args.to}")
    else:
        log(f"{out} is written from {trained.weights}; it reads back within {difference:.1e}")
    if args.dry_run:
        kind = "private" if args.private else "public"
        files = {
            str(path.relative_to(out)): path for path in sorted(out.rglob("*")) if path.is_file()
        }
        rows = {name: f"{path.stat().st_size:,} bytes" for name, path in files.items()}
        table(f"dry run: would be published as {args.push_to_hub} ({kind})", rows)
    elif args.push_to_hub:
        log(f"published: {publish(out, args.push_to_hub, args.private)}")
    return 0
