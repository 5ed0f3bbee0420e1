"""Connect to a Ray cluster, or start one on this machine until the command ends."""

import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flowalign.utils.imports import import_optional

_SILENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
"""Environment that disables Ray's usage statistics and the low priority of its workers."""
_SECONDS = 10.0
_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Environment of a cluster that listens on the loopback only; the variable works on any system."""


def prepare_ray(module: str, address: str | None = None) -> Any:
    """Return a module of Ray, imported with the environment that a cluster needs.

    Raises:
        ValueError: Ray is not installed.
    """
    os.environ.update(_SILENT if address else _SILENT | _LOOPBACK)
    return import_optional(module, "ray")


def join_cluster(cores: int, address: str | None = None) -> None:
    """Connect to the cluster at an address, or to a new one of this machine with `cores` cores.

    Only this machine can reach a new cluster. The command keeps its SIGTERM handler, which
    `ray.init` replaces.
    """
    ray = prepare_ray("ray", address)
    before = signal.getsignal(signal.SIGTERM)
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address:
        _check_address(address)
        ray.init(address=address, **quiet)
    else:
        ray.init("local", num_cpus=cores, include_dashboard=False, **quiet)
    signal.signal(signal.SIGTERM, before)


def _check_address(address: str) -> None:
    """Raise ValueError if nothing listens at an address; Ray would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if port.isdecimal():
            socket.create_connection((host, int(port)), timeout=_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"--address {address} does not answer ({error}): start Ray there, or drop --address"
        ) from error


@contextmanager
def connect(cores: int, address: str | None = None) -> Iterator[None]:
    """Connect to a cluster like `join_cluster`, and disconnect afterwards."""
    join_cluster(cores, address)
    try:
        yield
    finally:
        prepare_ray("ray", address).shutdown()


def check_cores(processes: int) -> int:
    """Return the number of GPUs of the cluster; raise ValueError if it has too few cores."""
    there = prepare_ray("ray").cluster_resources()
    cores = there.get("CPU", 0)
    if processes > cores:
        raise ValueError(f"--processes is {processes}, but the cluster has {cores:g} cores")
    return int(there.get("GPU", 0))
