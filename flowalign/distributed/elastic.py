"""Start a command as several processes by torch's elastic launcher, which end or restart together.

On one machine the launcher opens no port, and its processes meet through a private file.
"""

import json
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import HashStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from typing_extensions import override

from flowalign.distributed.launch import (
    RUN_ID,
    STARTS,
    STOPPED,
    STORE,
    Launch,
    read_first_failure,
)
from flowalign.utils.interrupts import SIGNALS, tie_all_children

_LOCAL = "local"
"""Name of the rendezvous of a launcher that is alone."""
_SECONDS_TO_STOP = 24 * 3600
"""Longest time that processes may need for the step in progress after a stop."""
_SECONDS_TO_NOTICE = 5
_SECONDS_TO_MEET = 600


def run_together(launch: Launch, command: Sequence[str]) -> int:
    """Run a command once per process, and return its exit code.

    The first failure ends all processes and is the only one reported. Ctrl-C and SIGTERM are
    forwarded, and the processes may finish a step before they stop. A third Ctrl-C ends them.
    """
    # Torch logs a failure as an error; after the last one, we print the message of the process.
    logging.disable(logging.WARNING if launch.restarts else logging.ERROR)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A machine that replaces a lost one would wait for the address of a store that outlives starts.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if launch.nodes == 1:  # gloo would listen at the address of the machine's name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    words = [word.replace("$", "$$") for word in command[1:]]  # torch fills in templates
    with tempfile.TemporaryDirectory(prefix="flowalign-", ignore_cleanup_errors=True) as folder:
        tie_all_children(Path(folder))
        logs = _Logs(folder)
        try:
            elastic_launch(_configure(launch, logs), command[0])(*words)
        except ChildFailedError as error:
            code, text = _describe(error.failures, launch)
        except RendezvousError as error:
            code = 1
            text = (
                f"flowalign: no other machine at --rendezvous {launch.rendezvous}, or it has left; "
                f"its own message tells why: {error}\n"
            )
        except SignalException as stop:
            left = read_first_failure(logs.attempt)
            code, text = left[1:] if left else (128 + stop.sigval, "")
        except KeyboardInterrupt:  # while the machines meet
            code, text = STOPPED[0], ""
        else:
            left = read_first_failure(logs.attempt)
            code, text = left[1:] if left else (0, "")
        sys.stderr.write(text)
        return code


class _Logs(DefaultLogsSpecs):
    """Error files of the processes, and the environment variables that differ between starts."""

    starts, attempt = 0, Path()
    """Number of starts, and the folder with the error files of the last one."""

    def reify(self, envs: dict[int, dict[str, str]]) -> Any:
        """Give processes the number of earlier starts, and a new file in which they meet."""
        for variables in envs.values():
            variables[STARTS] = str(self.starts)
            if STORE in os.environ:
                variables[STORE] = f"{os.environ[STORE]}{self.starts}"
        self.starts += 1
        files = super().reify(envs)
        self.attempt = Path(files.error_files[0]).parents[1]
        return files


def _configure(launch: Launch, logs: _Logs) -> LaunchConfig:
    """Return the settings of torch's launcher; a launcher that is alone opens no port."""
    if launch.nodes == 1:
        os.environ[STORE] = f"{logs.root_log_dir}/store"
    place = launch.rendezvous or ""
    return LaunchConfig(
        min_nodes=launch.nodes,
        max_nodes=launch.nodes,
        nproc_per_node=launch.processes,
        logs_specs=logs,
        run_id=RUN_ID,
        role="",
        rdzv_backend="c10d" if launch.nodes > 1 else _LOCAL,
        rdzv_endpoint=place,
        rdzv_configs={"read_timeout": _SECONDS_TO_MEET},
        max_restarts=launch.restarts,
        local_addr=_find_own_address(place) if launch.nodes > 1 else "127.0.0.1",
        # Torch replaces the handlers of these signals, even of those that nohup ignores.
        signals_to_handle=",".join(
            one.name for one in SIGNALS if signal.getsignal(one) != signal.SIG_IGN
        ),
        shutdown_timeout=_SECONDS_TO_STOP,
    )


class _MemoryBackend(C10dRendezvousBackend):
    """State of a rendezvous in the memory of this process."""

    # Torch unpickles the state, so who can write it can run code here.
    @property
    @override
    def name(self) -> str:
        """Return the name of the rendezvous."""
        return _LOCAL


def _meet_alone(settings: RendezvousParameters) -> RendezvousHandler:
    store = HashStore()
    return create_handler(store, _MemoryBackend(store, RUN_ID), settings)


def _describe(failures: Mapping[int, ProcessFailure], launch: Launch) -> tuple[int, str]:
    """Return the exit code of the launcher, and a message about the first failed process."""
    rank, first = min(failures.items(), key=lambda item: _date(item[1]))
    who = f"flowalign: process {rank} of {launch.processes * launch.nodes}"
    if first.exitcode < 0:
        name = signal.Signals(-first.exitcode).name
        why = ", as the system does when memory runs out" * (name == "SIGKILL")
        return 1, f"{who} was ended by {name}{why}\n"
    if Path(first.error_file).is_file():
        return first.exitcode, str(first.message)
    return first.exitcode, f"{who} ended with exit code {first.exitcode}\n"


def _date(failure: ProcessFailure) -> float:
    """Return when a process failed; torch compares only whole seconds."""
    if failure.exitcode == -signal.SIGTERM:  # torch ends the others so
        return float("inf")
    if failure.exitcode < 0:  # torch itself kills processes 30 seconds after the first failure
        return float(failure.timestamp) - _SECONDS_TO_NOTICE
    file = Path(failure.error_file)
    return file.stat().st_mtime if file.is_file() else float(failure.timestamp)


def _find_own_address(place: str) -> str:
    """Return the address of this machine on the way to the host of a rendezvous."""
    # Torch would take the name of this machine, which others often cannot resolve.
    host, _, port = place.rpartition(":")
    way = socket.getaddrinfo(host, int(port) or 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(*way[:2]) as connection:
        connection.connect(way[4])
        return connection.getsockname()[0]


rendezvous_handler_registry.register(_LOCAL, _meet_alone)

if __name__ == "__main__":
    launch = Launch(**json.loads(sys.argv[1]))
    safe = ["-P"] if sys.flags.safe_path else []
    sys.exit(run_together(launch, [sys.executable, *safe, "-m", "flowalign", *sys.argv[2:]]))
