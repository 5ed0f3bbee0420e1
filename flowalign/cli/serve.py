"""Runs `flowalign serve-reward`: serves reward models over HTTP."""

import argparse
import ipaddress
import os

from flowalign.cli.ranges import number, whole

HELP = "Serve reward models to other processes and machines."
LOOPBACK = ("localhost", "::1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `flowalign serve-reward`."""
    parser.add_argument("rewards", help="YAML file with `rewards:`, or the dotted path of a class")
    parser.add_argument("--host", default="127.0.0.1", help="default: this machine only")
    parser.add_argument("--port", type=whole(1, 65535), default=8411, help="default: 8411")
    parser.add_argument(
        "--max_batch", type=whole(1), default=64, help="samples per call of a model"
    )
    parser.add_argument(
        "--max_wait_ms",
        type=number(0.0),
        default=3.0,
        help="wait of a request for others in its batch",
    )
    parser.add_argument(
        "--deadline", type=number(0.001), default=60.0, help="seconds per request, at most"
    )
    parser.add_argument("--max_request_mb", type=number(0.001), default=256.0)
    parser.add_argument(
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
    from flowalign.rewards.http import application
    from flowalign.rewards.server import Limits, Service
    from flowalign.utils.errors import ConfigError

    token = os.environ.get(args.token_env)
    if not token and not is_loopback(args.host):
        raise ConfigError(
            f"--host {args.host} can be reached from other machines, so clients need a token:\n"
            f"set the environment variable {args.token_env}, or serve on 127.0.0.1"
        )
    models, _ = load_rewards(args.rewards)
    try:
        limits = Limits(args.max_batch, args.max_wait_ms, args.deadline, args.max_request_mb)
        service = Service(models, limits, token)
        app = application(service)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    import uvicorn
    from rich.console import Console

    log = Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print
    log(f"rewards on http://{args.host}:{args.port}: /health /spec /score. In a run file:")
    log(snippet(service, f"http://{args.host}:{args.port}"))
    uvicorn.run(app, host=args.host, port=args.port, log_level="warning", access_log=False)
    return 0


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
