"""Show all runs of a folder in a browser, also while they train."""

import argparse
from contextlib import suppress
from pathlib import Path

from flowalign.cli.commands.common import get_log, refuse_address
from flowalign.reports.view.server import ViewServer
from flowalign.utils.errors import ConfigError
from flowalign.utils.hosts import is_loopback


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted, and return 0; raise ConfigError for an unusable address."""
    folder = Path(args.runs)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; name one with runs, such as runs")
    with refuse_address(args.host, args.port):
        server = ViewServer(folder, args.host, args.port, args.every)
    log = get_log()
    if not is_loopback(args.host):
        log(f"--host {args.host}: everyone who can reach this machine can read the runs")
    log(f"runs of {folder} on http://{args.host}:{server.server_port}  (Ctrl-C ends it)")
    with server, suppress(KeyboardInterrupt):
        server.serve_forever()
    return 0
