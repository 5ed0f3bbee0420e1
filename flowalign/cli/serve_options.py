"""Serve reward models over HTTP: `flowalign serve-reward`."""

import argparse

from flowalign.cli.options import number, whole

HELP = "Serve reward models to other processes and machines."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `flowalign serve-reward`."""
    add = parser.add_argument
    add("rewards", help="YAML file with `rewards:`, or the dotted path of a class")
    add("--host", default="127.0.0.1", help="address to serve on (default: this machine only)")
    add("--port", type=whole(0, 65535), default=8411, help="port; 0: any free port (default: 8411)")
    add(
        "--socket",
        type=whole(0),
        metavar="FD",
        help="file descriptor of an inherited listening socket, used instead of host and port",
    )
    add("--max_batch", type=whole(1), default=64, help="samples per call of a model (default: 64)")
    add("--max_wait_ms", type=number(0.0), default=3.0, help="wait to fill a batch (default: 3)")
    add("--deadline", type=number(0.001), default=60.0, help="seconds per request (default: 60)")
    add("--read_timeout", type=number(0.001), default=30.0, help="seconds to read (default: 30)")
    add("--max_request_mb", type=number(0.001), default=256.0, help="MiB each (default: 256)")
    add("--max_image_mp", type=number(0.001), default=16.0, help="million pixels (default: 16)")
    add(
        "--max_request_mp",
        type=number(0.001),
        default=100.0,
        help="million pixels of a request (default: 100)",
    )
    add(
        "--max_held_mb",
        type=number(0.001),
        default=4096.0,
        help="MiB of all waiting requests (default: 4096)",
    )
    add("--max_requests", type=whole(1), default=1024, help="waiting requests (default: 1024)")
    add(
        "--token_env",
        default="FLOWALIGN_REWARD_TOKEN",
        metavar="NAME",
        help="environment variable with the token that clients must send",
    )
