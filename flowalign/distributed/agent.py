"""Start a command as several processes by torch's elastic agent, which end or restart together."""

import json
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler
from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from flowalign.distributed.failures import RUN_ID, STOPPED, USER_ERROR, read_first_failure
from flowalign.distributed.launch import RESTARTED, STORE, Launch
from flowalign.utils.interrupts import SIGNALS, handle_signals, tie_all_children

_Agent: Any = LocalElasticAgent
"""Base class as Any, because a decorator hides the types of its methods."""
_SECONDS_TO_END = 10
_SECONDS_TO_NOTICE = 5
_SECONDS_TO_MEET = 600


def run_together(launch: Launch, command: Sequence[str]) -> int:
    """Run a command once per process, and return its exit code.

    The first failure ends all processes and is the only one reported. Ctrl-C and SIGTERM are
    forwarded, and the processes may take as long as they need to stop. A third Ctrl-C ends them.
    """
    logging.disable()  # the agent's messages repeat ours
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Torch replaces the handlers of the signals listed here, even of those that nohup ignores.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    # A machine that replaces a lost one would wait for the address of a store that outlives starts.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if launch.nodes == 1:  # gloo would listen at the address of the machine's name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    with tempfile.TemporaryDirectory(prefix="flowalign-", ignore_cleanup_errors=True) as folder:
        tie_all_children(Path(folder))
        try:
            agent = Agent(launch, command, folder)
            with handle_signals(dict.fromkeys(SIGNALS, agent.forward)), suppress(KeyboardInterrupt):
                agent.run()
            agent.spec.rdzv_handler.shutdown()
        except RendezvousError as error:
            sys.stderr.write(
                f"flowalign: no other machine at --rendezvous {launch.rendezvous}, or it has left; "
                f"its own message tells why: {error}\n"
            )
            return 1
        return agent.report()


class Agent(_Agent):
    """Elastic agent that forwards signals, and does not restart what was stopped or is invalid."""

    def __init__(self, launch: Launch, command: Sequence[str], folder: str):
        self.launch, self.folder = launch, Path(folder)
        self.asked: list[int] = []
        """Received signals."""
        self.outcome = 0, ""
        """Exit code and message of the first failure."""
        self.spec = WorkerSpec(
            role="",
            local_world_size=launch.processes,
            entrypoint=command[0],
            args=tuple(word.replace("$", "$$") for word in command[1:]),  # torch fills in templates
            rdzv_handler=_meet(launch),
            max_restarts=launch.restarts,
        )
        super().__init__(self.spec, DefaultLogsSpecs(folder), shutdown_timeout=_SECONDS_TO_END)

    def forward(self, number: int, _: object) -> None:
        """Forward a signal to the processes; raise KeyboardInterrupt if there are none."""
        self.asked.append(number)
        handlers = getattr(self._pcontext, "subprocess_handlers", {}).values()
        running = [one.proc for one in handlers if one.proc.poll() is None]
        if not running or self.asked.count(signal.SIGINT) > 2:
            self.outcome = 128 + self.asked[0], ""
            raise KeyboardInterrupt
        for process in running:
            process.send_signal(number)

    def report(self) -> int:
        """Print the message of the first failure, and return the exit code."""
        if self.asked.count(signal.SIGINT) > 1:
            sys.stderr.write("flowalign: stopped; saved files are intact, continue with --resume\n")
            return 128 + signal.SIGINT
        code, text = self.outcome
        sys.stderr.write(text)
        return code

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        for path in self.folder.rglob("error.json"):
            path.unlink()
        if self.launch.nodes == 1:
            os.environ[STORE] = str(self.folder / f"store{self._remaining_restarts}")
        numbers = super()._start_workers(worker_group)
        os.environ[RESTARTED] = "1"  # processes that start later continue
        return numbers

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.is_failed():
            code, text = self.outcome = self._describe(result.failures)
            if self.asked or code in (USER_ERROR, *STOPPED):
                self._remaining_restarts = 0
            elif self._remaining_restarts:
                number = self.launch.restarts - self._remaining_restarts + 1
                sys.stderr.write(f"{text}flowalign: restart {number} of {self.launch.restarts}\n")
        elif result.state == WorkerState.SUCCEEDED:
            stopped = read_first_failure(self.folder)
            self.outcome = stopped[1:] if stopped else (0, "")
        return result

    def _describe(self, failures: Mapping[int, ProcessFailure]) -> tuple[int, str]:
        """Return the exit code of the launcher, and a message about the first failed process."""
        world, left = self.launch.processes * self.launch.nodes, read_first_failure(self.folder)
        codes = {rank: failure.exitcode for rank, failure in failures.items()}
        for rank, code in codes.items():
            # The agent itself kills processes 30 seconds after the first failure.
            noticed = failures[rank].timestamp - _SECONDS_TO_NOTICE
            if code < 0 and 128 - code not in STOPPED and (not left or noticed < left[0]):
                name = signal.Signals(-code).name
                why = ", as the system does when memory runs out" * (name == "SIGKILL")
                return 1, f"flowalign: process {rank} of {world} was ended by {name}{why}\n"
        if left:
            return left[1:]
        for rank, code in codes.items():
            if code > 0 and code not in STOPPED:
                text = f"flowalign: process {rank} of {world} ended with exit code {code}\n"
                return code, text
        if self.asked:  # torch sends SIGTERM to processes that stop later than the first
            return 128 + self.asked[0], ""
        return max(abs(code) % 128 + 128 for code in codes.values()), ""


def _meet(launch: Launch) -> RendezvousHandler:
    """Return how the launchers meet; a launcher that is alone opens no port."""
    nodes, place = launch.nodes, launch.rendezvous or ""
    own = _find_own_address(place) if nodes > 1 else "127.0.0.1"
    settings = RendezvousParameters(
        "c10d", place, RUN_ID, nodes, nodes, own, read_timeout=_SECONDS_TO_MEET
    )
    if nodes > 1:
        return get_rendezvous_handler(settings)
    # Torch unpickles the state of the rendezvous, so who can write it can run code here.
    store = HashStore()
    return create_handler(store, C10dRendezvousBackend(store, RUN_ID), settings)


def _find_own_address(place: str) -> str:
    """Return the address of this machine on the way to the host of a rendezvous."""
    # Torch would take the name of this machine, which others often cannot resolve.
    host, _, port = place.rpartition(":")
    way = socket.getaddrinfo(host, int(port) or 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(*way[:2]) as connection:
        connection.connect(way[4])
        return connection.getsockname()[0]


if __name__ == "__main__":
    launch = Launch(**json.loads(sys.argv[1]))
    sys.exit(run_together(launch, [sys.executable, "-m", "flowalign", *sys.argv[2:]]))
