"""Runs `flowalign serve-reward`: serves reward models over HTTP."""

import argparse
import ipaddress
import os
import socket

from flowalign.cli.ranges import number, whole

HELP = "Serve reward models to other processes and machines."
LOOPBACK = ("localhost", "::1")
_LIMITS = (
    *("max_batch", "max_wait_ms", "deadline", "max_request_mb", "max_picture_mp"),
    *("max_request_mp", "max_held_mb", "max_requests", "read_timeout"),
)
"""Options that are fields of Limits."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `flowalign serve-reward`."""
    add = parser.add_argument
    add("rewards", help="YAML file with `rewards:`, or the dotted path of a class")
    add("--host", default="127.0.0.1", help="default: this machine only")
    add("--port", type=whole(0, 65535), default=8411, help="0: any that is free")
    add(
        "--socket",
        type=whole(0),
        metavar="FD",
        help="serve on this listening socket, which the starter opened, and not on host and port",
    )
    add("--max_batch", type=whole(1), default=64, help="samples per call of a model")
    add(
        "--max_wait_ms",
        type=number(0.0),
        default=3.0,
        help="wait of a request for others",
    )
    add("--deadline", type=number(0.001), default=60.0, help="seconds per request, at most")
    add(
        "--read_timeout",
        type=number(0.001),
        default=30.0,
        help="seconds for a request to arrive",
    )
    add("--max_request_mb", type=number(0.001), default=256.0, help="MiB of a request")
    add(
        "--max_picture_mp",
        type=number(0.001),
        default=16.0,
        help="million pixels of a picture",
    )
    add("--max_request_mp", type=number(0.001), default=100.0, help="million pixels of a request")
    add("--max_held_mb", type=number(0.001), default=4096.0, help="MiB of all requests that wait")
    add("--max_requests", type=whole(1), default=1024, help="requests that wait")
    add(
        "--token_env",
        default="FLOWALIGN_REWARD_TOKEN",
        metavar="NAME",
        help="environment variable with the token that clients must send",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted; returns 0.

    Raises:
        ConfigError: The options or the rewards need a correction by the user.
    """
    from flowalign.rewards.config import load_rewards
    from flowalign.rewards.http import needs_http, server
    from flowalign.rewards.limits import Limits
    from flowalign.rewards.server import Service
    from flowalign.utils.console import say
    from flowalign.utils.errors import ConfigError

    token = os.environ.get(args.token_env)
    if not token and not is_loopback(args.host):
        raise ConfigError(
            f"--host {args.host} can be reached from other machines, so clients need a token:\n"
            f"set the environment variable {args.token_env}, or serve on 127.0.0.1"
        )
    try:
        limits = Limits(**{name: vars(args)[name] for name in _LIMITS})
        needs_http()
        with _listening(args) as listening:
            service = Service(load_rewards(args.rewards)[0], limits, token)
            host, port = listening.getsockname()[:2]
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            say(f"rewards on {url}: /health /spec /score. In a run file:")
            say(snippet(service, url))
            server(service).run(sockets=[listening])
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return 0


def _listening(args: argparse.Namespace) -> socket.socket:
    from flowalign.rewards.listening import bound

    if args.socket is None:
        return bound(args.host, args.port)
    try:
        return socket.socket(fileno=args.socket)
    except OSError as error:
        raise ValueError(f"--socket {args.socket} is no socket: {error.strerror}") from error


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in LOOPBACK


def snippet(service, url: str) -> str:
    """Return the lines of a run file that use a server's models."""
    lines = ["rewards:"]
    for name, batcher in service.batchers.items():
        spec = batcher.model.spec
        lines += [
            "- class_path: reward_models.remote.RemoteReward",
            f"  init_args: {{url: {url}, model: {name}, dims: [{', '.join(spec.dims)}]}}",
        ]
    return "\n".join(lines)
