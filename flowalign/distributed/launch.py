"""Start a command as several processes."""

import os
import sys
from collections.abc import Sequence

_STOPPED = 130, 143
"""Exit codes of processes that stopped because Ctrl-C or SIGTERM asked them to."""
_SECONDS_TO_STOP = 24 * 3600
"""Time that stopping processes get for the step at hand, before they are killed."""


def relaunch(processes: int, argv: Sequence[str]) -> None:
    """Replace this process by `torchrun`, which starts the command once per process."""
    options = ["--standalone", f"--nproc-per-node={processes}"]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SECONDS_TO_STOP))
    command = ["-m", __name__, *options, "-m", "flowalign", *argv]
    os.execv(sys.executable, [sys.executable, *command])


def main() -> int:
    """Launch as torchrun does, and return the exit code: that of the processes if they stopped."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun()
    except SignalException as stop:  # it was handed on to the processes, which have ended
        return 128 + stop.sigval
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        stopped = [code for code in codes if code in _STOPPED]
        if not stopped:
            raise
        return max(stopped)
    return 0


if __name__ == "__main__":
    sys.exit(main())
