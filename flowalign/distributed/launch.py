"""Start a command as several processes."""

import os
import sys
from collections.abc import Sequence


def relaunch(processes: int, argv: Sequence[str]) -> None:
    """Replace this process by `torchrun`, which starts the command once per process."""
    module = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.execv(sys.executable, [sys.executable, *module, "-m", "flowalign", *argv])
