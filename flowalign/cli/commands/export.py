"""Write trained weights for other programs, and publish them."""

import argparse
from pathlib import Path

from flowalign.cli.commands.common import get_log
from flowalign.runs.export.evidence import read_benchmarks
from flowalign.runs.export.export_weights import Form, export, find_trained, prepare
from flowalign.utils.console import table
from flowalign.utils.errors import ConfigError, convert_value_errors
from flowalign.utils.hub import check_name, check_publishing, publish


@convert_value_errors()
def run(args: argparse.Namespace) -> int:
    """Write the folder, publish it if asked to, and return 0."""
    log, source = get_log(), Path(args.source)
    if args.dry_run and not args.push_to_hub:
        raise ConfigError("--dry-run needs --push-to-hub OWNER/NAME")
    if args.push_to_hub:
        if not args.license:
            raise ConfigError(
                "--push-to-hub needs --license: the licence of the base model binds the trained "
                "weights"
            )
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
