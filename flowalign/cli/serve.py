"""Serve reward models over HTTP: `flowalign serve-reward`."""

import argparse
import os
import socket
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from flowalign.cli.options import number, whole
from flowalign.utils.console import say
from flowalign.utils.errors import explain_errors
from flowalign.utils.hosts import is_loopback
from flowalign.utils.imports import import_optional

if TYPE_CHECKING:
    from flowalign.rewards.batching import Queue

HELP = "Serve reward models to other processes and machines."
_POSITIVE = number(0.001)
_LIMITS = {
    "max_batch": (whole(1), 64, "samples per call of a model"),
    "max_wait_ms": (number(0.0), 3.0, "wait to fill a batch"),
    "deadline": (_POSITIVE, 60.0, "seconds per request"),
    "read_timeout": (_POSITIVE, 30.0, "seconds to read"),
    "max_request_mb": (_POSITIVE, 256.0, "MiB each"),
    "max_image_mp": (_POSITIVE, 16.0, "million pixels"),
    "max_request_mp": (_POSITIVE, 100.0, "million pixels of a request"),
    "max_held_mb": (_POSITIVE, 4096.0, "MiB of all waiting requests"),
    "max_requests": (whole(1), 1024, "waiting requests"),
}
"""Types, defaults and descriptions of the options that are `Limits` of the server."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `flowalign serve-reward`."""
    add = parser.add_argument
    add("rewards", help="YAML file with `rewards:`, or the dotted path of a class")
    add_address(parser, 8411)
    add(
        "--socket",
        type=whole(0),
        metavar="FD",
        help="file descriptor of an inherited listening socket, used instead of host and port",
    )
    for name, (kind, default, what) in _LIMITS.items():
        add(f"--{name}", type=kind, default=default, help=f"{what} (default: {default:g})")


def add_address(parser: argparse.ArgumentParser, port: int) -> None:
    """Add the options of a server's address and of the token that protects it."""
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to serve on (default: this machine only)")
    add(
        "--port",
        type=whole(0, 65535),
        default=port,
        help=f"port; 0: any free port (default: {port})",
    )
    add(
        "--token_env",
        default="FLOWALIGN_REWARD_TOKEN",
        metavar="NAME",
        help="environment variable with the token that clients must send",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted, and return 0."""
    from flowalign.rewards.batching import Limits
    from flowalign.rewards.config import load_rewards

    token = read_token(args)
    limits = Limits(**{name: vars(args)[name] for name in _LIMITS})
    import_optional("fastapi", "serve")
    # The server imports FastAPI, which only the extra `serve` installs.
    from flowalign.rewards.reward_server import (
        Service,
        application,
        build_server,
        listen,
        start_queues,
    )

    with _adopt_socket(args.socket) or listen(args.host, args.port) as listening:
        service = Service(start_queues(load_rewards(args.rewards)[0], limits), limits, token)
        url = format_url(listening)
        say(f"rewards on {url}: /health /spec /score. In a run file:")
        say(format_snippet(service.queues, url))
        app = application(service, args.host)
        build_server(app, limits.read_timeout).run(sockets=[listening])
    return 0


def read_token(args: argparse.Namespace) -> str | None:
    """Return the token that clients must send; raise ValueError if a public server has none."""
    token = os.environ.get(args.token_env)
    if not token and not is_loopback(args.host):
        raise ValueError(
            f"--host {args.host} can be reached from other machines, so clients need a token:\n"
            f"set the environment variable {args.token_env}, or serve on 127.0.0.1"
        )
    return token


def format_url(listening: socket.socket) -> str:
    """Return the URL of a socket that listens."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _adopt_socket(descriptor: int | None) -> socket.socket | None:
    """Return the socket that the parent process opened, or None if it opened none."""
    with explain_errors(f"--socket {descriptor} is no socket", OSError):
        return None if descriptor is None else socket.socket(fileno=descriptor)


def format_snippet(queues: "Mapping[str, Queue]", url: str) -> str:
    """Return the lines of a run file that use a server's models."""
    lines = ["rewards:"]
    for name, queue in queues.items():
        lines += format_entries(name, queue.spec.dims, url)
    return "\n".join(lines)


def format_entries(
    name: str, dims: Sequence[str], url: str, more: Mapping[str, int] = MappingProxyType({})
) -> list[str]:
    """Return the lines of a run file that use one model of a server, with further settings."""
    further = "".join(f", {key}: {value}" for key, value in more.items())
    return [
        "- class_path: reward_models.RemoteReward",
        f"  init_args: {{url: {url}, model: {name}, dims: [{', '.join(dims)}]{further}}}",
    ]
