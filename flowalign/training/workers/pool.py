"""Sample rollouts in worker processes, during the update of the previous step if allowed.

step t:   training process          worker
          collect rollouts of t     (sampled)
          send weights, request t+1
          score t, update           sample t+1 with the weights before the update
"""

import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, Literal, TypeVar

from safetensors.torch import load, save_file
from torch import Tensor

from flowalign.training.learner import Learner, TrainingFailure
from flowalign.training.workers.process import (
    WorkerFailed,
    WorkerLost,
    WorkerProcess,
    digest_tensors,
)
from flowalign.types.ranges import NonNegativeInt, PositiveFloat, PositiveInt, require_ranges
from flowalign.utils.costs import Costs
from flowalign.utils.files import atomic_write, write_text

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RolloutWorkers:
    """Settings of the processes that sample rollouts for a training process."""

    workers: PositiveInt = 1
    """Number of workers of each training process."""
    max_staleness: Literal[0, 1] = 0
    """Largest age of the weights that sample a rollout, in training steps. 0: the same rollouts as
    without workers. 1: workers sample the next step during the update of this one."""
    devices: list[str] | None = None
    """Device of each worker: `cpu`, or `cuda:N` in the numbering of the training process. Null:
    the device of the training process."""
    timeout: PositiveFloat = 600.0
    """Longest time in seconds to wait for an answer. A worker without an answer is restarted."""
    start_timeout: PositiveFloat = 1800.0
    """Longest time in seconds to load the model."""
    restarts: NonNegativeInt = 3
    """Number of restarts of killed or hanging workers per run. After that the run ends."""

    def __post_init__(self) -> None:
        """Reject settings outside their ranges."""
        require_ranges(self, "rollouts")
        if self.devices is None:
            return
        valid = all(re.fullmatch(r"cpu|cuda:\d+", device) for device in self.devices)
        if not valid or len(self.devices) != self.workers:
            raise ValueError(
                f"rollouts.devices is {self.devices}; it must name `cpu` or `cuda:N` for each of "
                f"the {self.workers} workers, or be null"
            )

    @property
    def rows(self) -> dict[str, str]:
        """Return the row of the plan table about the workers."""
        age = "by the current weights"
        if self.max_staleness:
            age = "during the update of the previous step, by weights one step old"
        return {
            "rollout workers": f"{self.workers} per process, each with a copy of the model; they "
            f"sample {age}"
        }

    def check_prompts(self, prompts_per_step: int, world: int) -> None:
        """Raise ValueError if a worker would have no prompt."""
        if prompts_per_step // world < self.workers:
            raise ValueError(
                f"rollouts.workers is {self.workers}, but each training process samples "
                f"{prompts_per_step // world} prompts per step: set at most that many workers"
            )


class WorkerPool:
    """Workers of one training process.

    `config` is the run file as YAML, from which workers build the policy. `num_steps` is the number
    of training steps of the run.
    """

    def __init__(
        self,
        cfg: RolloutWorkers,
        config: str,
        num_steps: int,
        log: Callable[[str], None] = lambda _: None,
    ):
        self.cfg, self.num_steps, self.log = cfg, num_steps, log
        self.restarts = cfg.restarts
        self.metrics: dict[str, float] = {}
        """Staleness of the collected rollouts, waiting time, and utilization."""
        self._folder = tempfile.TemporaryDirectory(prefix="flowalign-", ignore_cleanup_errors=True)
        run_file = Path(self._folder.name, "run.yaml")
        write_text(run_file, config)
        self.workers = [
            WorkerProcess(run_file, device, cfg.timeout, cfg.start_timeout)
            for device in cfg.devices or [None] * cfg.workers
        ]
        self._requested: int | None = None
        self._version = 0
        self._since: float | None = None
        self._waited = self._busy = 0.0

    def sample(
        self, step: int, parts: Sequence[Sequence[int]], learner: Learner, costs: Costs
    ) -> Iterator[dict[str, Tensor]]:
        """Yield the tensors that a worker samples for each part of the requests of a step.

        `parts` are indices of requests, equal in all steps. The learner's current weights sample
        this step, or with staleness 1 the next one. The workers' evaluations are added to `costs`.

        Raises:
            TrainingFailure: A worker failed, or no restarts are left.
        """
        if self._requested != step:
            self._request(step, step, parts, learner)
        version = self._version
        for number in range(len(parts)):
            start = time.perf_counter()
            answer = self._ask(self.workers[number % len(self.workers)], WorkerProcess.next_answer)
            self._waited += time.perf_counter() - start
            self._busy += answer["seconds"]
            for name, count in answer["costs"].items():
                setattr(costs, name, getattr(costs, name) + count)
            file = Path(answer["file"])
            tensors = load(file.read_bytes())
            file.unlink()
            if number == len(parts) - 1:  # a caller may not run the generator to its end
                self._measure(step, version)
                if self.cfg.max_staleness and step + 1 < self.num_steps:
                    self._request(step + 1, step, parts, learner)
            yield tensors

    def divide(self, places: Sequence[int], size: int | None = None) -> list[Sequence[int]]:
        """Return parts of at most `size` indices; None: one part for each worker."""
        size = size or ceil(len(places) / len(self.workers))
        return [places[start : start + size] for start in range(0, len(places), size)]

    def close(self) -> None:
        """End all workers."""
        for worker in self.workers:
            worker.end()
        self._folder.cleanup()

    def _request(
        self, step: int, version: int, parts: Sequence[Sequence[int]], learner: Learner
    ) -> None:
        """Send the current weights, which `version` steps have trained, and the parts of a step."""
        weights, count = self._write_weights(learner), len(self.workers)
        for i, worker in enumerate(self.workers):
            jobs = [{"step": step, "places": list(part)} for part in parts[i::count]]
            worker.assign(weights, jobs)
        for worker in self.workers:
            self._ask(worker, WorkerProcess.begin)
        self._requested, self._version = step, version

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

    def _measure(self, step: int, version: int) -> None:
        """Set the metrics; utilization is that since the previous step's rollouts were collected.

        The first step has none, because the workers load the model.
        """
        now, since = time.perf_counter(), self._since
        self.metrics = {
            "rollout/weight_version": float(version),
            "rollout/staleness": float(step - version),
            "timing/rollout_wait": self._waited,
        }
        if since is not None:
            self.metrics["utilization/trainer"] = 1 - self._waited / (now - since)
            self.metrics["utilization/workers"] = self._busy / (now - since) / len(self.workers)
        self._since, self._waited, self._busy = now, 0.0, 0.0
