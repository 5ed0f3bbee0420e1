"""Sample rollouts in worker processes, during the update of the previous step if allowed."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from safetensors.torch import load, save_file
from typing_extensions import override

from flowalign.training.learner import Learner, TrainingFailure
from flowalign.training.workers.process import (
    WorkerFailed,
    WorkerLost,
    WorkerProcess,
    digest_tensors,
)
from flowalign.training.workers.rollout_pool import Answer, RolloutPool
from flowalign.training.workers.worker_settings import RolloutWorkers
from flowalign.utils.files import atomic_write, write_text

T = TypeVar("T")


class WorkerPool(RolloutPool):
    """Worker processes of one training process.

    `config` is the run file as YAML, from which workers build the policy.
    """

    def __init__(
        self,
        cfg: RolloutWorkers,
        config: str,
        num_steps: int,
        log: Callable[[str], None] = lambda _: None,
    ):
        super().__init__(cfg, num_steps, cfg.workers)
        self.log, self.restarts = log, cfg.restarts
        self._folder = tempfile.TemporaryDirectory(prefix="flowalign-", ignore_cleanup_errors=True)
        run_file = Path(self._folder.name, "run.yaml")
        write_text(run_file, config)
        self.workers = [
            WorkerProcess(run_file, device, cfg.timeout, cfg.start_timeout)
            for device in cfg.devices or [None] * cfg.workers
        ]

    @override
    def begin(self, step: int, parts: Sequence[Sequence[int]], learner: Learner) -> None:
        weights, count = self._write_weights(learner), len(self.workers)
        for i, worker in enumerate(self.workers):
            jobs = [{"step": step, "places": list(part)} for part in parts[i::count]]
            worker.assign(weights, jobs)
        for worker in self.workers:
            self._ask(worker, WorkerProcess.begin)

    @override
    def collect(self, number: int) -> Answer:
        answer = self._ask(self.workers[number % len(self.workers)], WorkerProcess.next_answer)
        file = Path(answer["file"])
        tensors = load(file.read_bytes())
        file.unlink()
        return Answer(tensors, answer["seconds"], answer["costs"])

    @override
    def close(self) -> None:
        for worker in self.workers:
            worker.end()
        self._folder.cleanup()

    def _write_weights(self, learner: Learner) -> dict[str, Any]:
        """Write the trained weights to the shared folder; return the message that names them."""
        named = {name: value.cpu().contiguous() for name, value in learner.snapshot()}
        path = Path(self._folder.name, "weights.safetensors")
        with atomic_write(path, alone=True) as partial:
            save_file(named, partial)
        return {"weights": str(path), "count": len(named), "digest": digest_tensors(named)}

    def _ask(self, worker: WorkerProcess, call: Callable[[WorkerProcess], T]) -> T:
        """Return the answer of a worker, which is restarted with the same work if it is lost."""
        name = f"rollout worker {self.workers.index(worker) + 1} of {len(self.workers)}"
        while True:
            try:
                return call(worker)
            except WorkerFailed as error:
                raise TrainingFailure(f"{name} failed: {error}") from error
            except WorkerLost as error:
                worker.end()
                if not self.restarts:
                    raise TrainingFailure(
                        f"{name} was lost, and rollouts.restarts are used up: {error}"
                    ) from error
                self.restarts -= 1
                self.log(f"{name} was lost and restarts with the same work: {error}")
                worker.start()
