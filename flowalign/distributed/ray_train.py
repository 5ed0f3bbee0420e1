"""Run a command on the workers of a Ray cluster, with Ray Train.

Ray places the workers, and starts all of them again if one fails. Each worker runs the command in a
thread, as one of the processes that train together.
"""

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import TextIOBase
from pathlib import Path
from typing import Any

from flowalign.distributed.launch import (
    RUN_ID,
    STARTS,
    STOPPED,
    USER_ERROR,
    leave_crash,
    read_first_failure,
)
from flowalign.utils.interrupts import SIGNALS, handle_signals, listen_to
from flowalign.utils.ray_cluster import check_cores, connect, prepare_ray

_SECONDS_BETWEEN_LOOKS = 0.5


@dataclass(frozen=True)
class RayLaunch:
    """Number of workers, and where they run."""

    workers: int
    """Workers. Each has one core and, if `device` allows it and there are GPUs, one GPU."""
    restarts: int = 0
    """Restarts of all workers after the failure of one."""
    address: str | None = None
    """Address of a running cluster. None: a new cluster on this machine for this command."""
    device: str = "auto"
    """Device of the run: auto, cuda or cpu."""


class Board:
    """What the command and its workers tell each other; an actor on the machine of the command."""

    def __init__(self) -> None:
        self.stop, self.starts, self.output = 0, 0, ""
        self.failure: tuple[int, str] | None = None

    def begin(self, rank: int) -> bool:
        """Note a start of a worker; return whether earlier workers began the run."""
        if rank == 0:
            self.starts, self.failure = self.starts + 1, None
        return self.starts > 1

    def get_stop(self) -> int:
        """Return the signal that asks the workers to stop, or 0."""
        return self.stop

    def end(self, code: int, text: str) -> None:
        """Note how a worker ended, unless an earlier one has failed."""
        self.failure = self.failure or (code, text)

    def write(self, text: str) -> None:
        """Append text to the output of the command."""
        self.output += text

    def read(self, stop: int) -> tuple[str, int, tuple[int, str] | None]:
        """Return new output, the number of starts, and how the first failed worker ended.

        Workers stop after the current step if `stop` is a signal.
        """
        self.stop = stop
        output, self.output = self.output, ""
        return output, self.starts, self.failure


def run_on_ray(launch: RayLaunch, main: Callable[[Sequence[str]], None], words: list[str]) -> int:
    """Run `main(words)` on the workers of a cluster; return the exit code.

    The first failure is the only one reported. Ctrl-C and SIGTERM let the workers stop after the
    current step; a second Ctrl-C ends them.

    Raises:
        ValueError: Ray is not installed, or the cluster has too few cores or GPUs.
    """
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # relative paths resolve as in the command
    os.environ["RAY_TRAIN_ENABLE_PRINT_PATCH"] = "0"
    # Ray's default is a minute, and it tries again forever: too short for a busy machine.
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "600")
    prepare_ray("ray.train.torch", launch.address)
    asked: list[int] = []
    with (
        tempfile.TemporaryDirectory(prefix="flowalign-", ignore_cleanup_errors=True) as folder,
        connect(launch.workers, launch.address),
        handle_signals(dict.fromkeys(SIGNALS, lambda number, _: asked.append(number))),
    ):
        import ray
        from ray.exceptions import RayError

        gpus = check_cores(launch.workers)
        board = ray.remote(Board).options(num_cpus=0, **_on_this_machine()).remote()
        work = {"board": board, "main": main, "words": words, "folder": str(Path.cwd())}
        trainer = _build_trainer(launch, gpus, folder, work)
        # The thread that waits for Ray Train loses its cluster if this function returns first.
        threading.excepthook = lambda _: None
        try:
            code, text = _wait(trainer, board, launch, asked)
        except RayError as error:
            code, text = 1, f"flowalign: the Ray cluster ended: {str(error).splitlines()[0]}\n"
    if text:
        sys.stderr.write(text)
    return code


def _on_this_machine() -> dict[str, Any]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = ray.get_runtime_context().get_node_id()
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


def _build_trainer(launch: RayLaunch, gpus: int, folder: str, config: dict[str, Any]) -> Any:
    from ray import train
    from ray.train.torch import TorchTrainer

    return TorchTrainer(
        _work,
        train_loop_config=config,
        scaling_config=train.ScalingConfig(
            num_workers=launch.workers, use_gpu=gpus > 0 and launch.device != "cpu"
        ),
        # Checkpoints are our own, in the run directory, which all workers share.
        run_config=train.RunConfig(
            storage_path=folder,
            failure_config=train.FailureConfig(max_failures=launch.restarts),
            logging_config=train.LoggingConfig(log_level="CRITICAL"),
        ),
    )


def _work(config: dict[str, Any]) -> None:
    """Run the command as one worker; raise an error if it fails, which ends the others."""
    import ray

    board, rank = config["board"], int(os.environ["RANK"])
    os.chdir(config["folder"])
    if ray.get(board.begin.remote(rank)):
        os.environ[STARTS] = "1"
    listen_to(lambda: ray.get(board.get_stop.remote()))
    code, output = 0, _Output(board)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        file = Path(folder, "error.json")
        os.environ |= {"TORCHELASTIC_RUN_ID": RUN_ID, "TORCHELASTIC_ERROR_FILE": str(file)}
        stack.callback(_report_failure, board, Path(folder))
        stack.push(leave_crash)
        stack.enter_context(redirect_stdout(output))
        stack.enter_context(redirect_stderr(output))
        try:
            config["main"](config["words"])
        except SystemExit as ended:
            code = int(ended.code or 0)
    if code:
        raise RuntimeError(f"exit code {code}")


def _report_failure(board: Any, folder: Path) -> None:
    import ray

    if left := read_first_failure(folder):
        ray.get(board.end.remote(*left[1:]))


class _Output(TextIOBase):
    """Output of a worker; only the first one prints."""

    def __init__(self, board: Any):
        self.board = board

    def write(self, text: str) -> int:
        """Send text to the command."""
        self.board.write.remote(text)
        return len(text)


def _wait(trainer: Any, board: Any, launch: RayLaunch, asked: list[int]) -> tuple[int, str]:
    """Wait for the workers, and forward signals; return the exit code and a message."""
    import ray

    errors: list[Exception] = []
    runner = threading.Thread(target=_fit, args=(trainer, errors), daemon=True)
    runner.start()
    told = 1
    while runner.is_alive():
        runner.join(_SECONDS_BETWEEN_LOOKS)
        if asked.count(signal.SIGINT) > 1:
            return 128 + signal.SIGINT, "flowalign: stopped; continue with --resume\n"
        output, starts, failure = ray.get(board.read.remote(asked[0] if asked else 0))
        sys.stdout.write(output)
        sys.stdout.flush()
        if failure and failure[0] == USER_ERROR:
            return failure  # Ray would start the workers again
        if starts > told:
            told = starts
            sys.stderr.write(f"flowalign: restart {starts - 1} of {launch.restarts}\n")
    output, _, failure = ray.get(board.read.remote(0))
    sys.stdout.write(output)
    if not errors:
        return failure if failure and failure[0] in STOPPED else (0, "")
    return _describe(errors[0], failure, launch.workers)


def _fit(trainer: Any, errors: list[Exception]) -> None:
    from ray.exceptions import RayError
    from ray.train import TrainingFailedError

    try:
        trainer.fit()
    except (TrainingFailedError, RayError) as error:
        errors.append(error)


def _describe(error: Exception, failure: tuple[int, str] | None, workers: int) -> tuple[int, str]:
    """Return an exit code, and a message about the first worker that failed."""
    from ray.exceptions import RayActorError

    failed = getattr(error, "worker_failures", {})
    lost = [rank for rank, reason in failed.items() if isinstance(reason, RayActorError)]
    if lost:
        return 1, f"flowalign: Ray lost worker {lost[0]} of {workers}, or its machine\n"
    if failure:
        return failure
    return 1, f"flowalign: {str(error).strip().splitlines()[-1]}\n"
