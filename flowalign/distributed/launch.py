"""Replace a command that several processes share by their launcher."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NoReturn

from flowalign.utils.errors import ConfigError

RESTARTED = "FLOWALIGN_RESTARTED"
"""Environment variable of processes that continue the work of earlier ones."""
STORE = "FLOWALIGN_STORE"
"""Environment variable with the private file through which processes of one machine meet."""


@dataclass(frozen=True)
class Launch:
    """Number of processes and machines, and restarts after a failure."""

    processes: int
    """Processes on each machine."""
    restarts: int = 0
    """Restarts of all processes after the failure of one."""
    nodes: int = 1
    """Machines."""
    rendezvous: str | None = None
    """Address where the launchers of several machines meet, `host:port` of one of them."""


def starts_others(processes: int, launched: bool = False) -> bool:
    """Return whether this process must start others; False if it is alone or was started itself.

    `launched`: a single process needs a launcher as well.
    """
    if "RANK" not in os.environ:
        return launched or processes > 1
    started = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))
    if str(processes) not in ("1", started):
        raise ConfigError(f"--processes is {processes}, but torchrun has started {started}")
    return False


def relaunch(launch: Launch, argv: Sequence[str]) -> NoReturn:
    """Replace this process by a launcher that starts the command once per process.

    The launcher lives as long as the processes, so it must not keep the memory and the GPU context
    of a process that has checked the command.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    words = ["-m", "flowalign.distributed.agent", json.dumps(asdict(launch)), *argv]
    os.execv(sys.executable, [sys.executable, *words])


def is_restarted() -> bool:
    """Return whether this process continues the work of an earlier one of the same launcher."""
    return RESTARTED in os.environ or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
