"""Show all runs of a folder in a browser, also while they train: `flowalign view`."""

import argparse

from flowalign.cli.options import number, whole

HELP = "Show all runs of a folder in a browser, also while they train."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the folder, and the address of the page."""
    parser.add_argument("runs", nargs="?", default="runs", help="folder with runs (default: runs)")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to serve on (default: this machine only)"
    )
    parser.add_argument(
        "--port", type=whole(0, 65535), default=8412, help="port; 0: any free port (default: 8412)"
    )
    parser.add_argument(
        "--every",
        type=number(1.0, 3600.0),
        default=5.0,
        help="seconds between updates (default: 5)",
    )
