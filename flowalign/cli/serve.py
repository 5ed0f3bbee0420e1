"""Serve reward models over HTTP: `flowalign serve-reward`."""

import argparse
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import TYPE_CHECKING

from flowalign.cli.options import number, whole
from flowalign.utils.console import say
from flowalign.utils.errors import ConfigError, convert_value_errors
from flowalign.utils.hosts import is_loopback
from flowalign.utils.imports import import_optional

if TYPE_CHECKING:
    from flowalign.rewards.batching import Queue

HELP = "Serve reward models to other processes and machines."


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


@convert_value_errors()
def run(args: argparse.Namespace) -> int:
    """Serve until interrupted, and return 0."""
    from flowalign.rewards.batching import Limits
    from flowalign.rewards.config import load_rewards

    token = read_token(args)
    limits = Limits(**{field.name: vars(args)[field.name] for field in fields(Limits)})
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
    """Return the token that clients must send; raise ConfigError if a public server has none."""
    token = os.environ.get(args.token_env)
    if not token and not is_loopback(args.host):
        raise ConfigError(
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
    try:
        return None if descriptor is None else socket.socket(fileno=descriptor)
    except OSError as error:
        raise ValueError(f"--socket {descriptor} is no socket: {error.strerror}") from error


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
