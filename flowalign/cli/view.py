"""Show all runs of a folder in a browser, while they go: `flowalign view`."""

import argparse
from pathlib import Path

from flowalign.cli.messages import UsageError, printer
from flowalign.cli.ranges import number, whole
from flowalign.cli.serve import LOOPBACK, is_loopback

HELP = "Show all runs of a folder in a browser, while they go."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the folder, and the address of the page."""
    parser.add_argument("runs", nargs="?", default="runs", help="folder with runs; default: runs")
    parser.add_argument("--host", default="127.0.0.1", help="default: this machine only")
    parser.add_argument(
        "--port", type=whole(0, 65535), default=8412, help="default: 8412; 0 takes any that is free"
    )
    parser.add_argument(
        "--every",
        type=number(1.0, 3600.0),
        default=5.0,
        help="seconds between looks; default: 5",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted; return 0.

    Raises:
        UsageError: The folder or the address cannot be used.
    """
    folder = Path(args.runs)
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder; name one with runs, such as runs")
    from flowalign.reports.view.server import Server

    names = ("127.0.0.1", args.host, *LOOPBACK) if is_loopback(args.host) else ()
    try:
        server = Server(folder, args.host, args.port, args.every, names)
    except OSError as error:
        raise UsageError(
            f"cannot serve on --host {args.host} --port {args.port}: {error.strerror or error}; "
            "choose another, or --port 0 for any that is free"
        ) from error
    log = printer()
    if not names:
        log(f"--host {args.host}: whoever reaches this machine can read the runs")
    log(f"runs of {folder} on http://{args.host}:{server.server_port}  (Ctrl-C ends it)")
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0
