"""Define the interface of rollout workers, and the order of their work.

step t:   training process          worker
          collect rollouts of t     (sampled)
          send weights, request t+1
          score t, update           sample t+1 with the weights before the update
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from torch import Tensor

from flowalign.training.learner import Learner
from flowalign.training.workers.worker_settings import RolloutWorkers
from flowalign.utils.costs import Costs


@dataclass(frozen=True)
class Answer:
    """Rollouts of one part of the requests of a step."""

    tensors: dict[str, Tensor]
    """Sampled tensors, by name."""
    seconds: float
    """Time that the worker sampled, in seconds."""
    costs: Mapping[str, int]
    """Counts of the work, named as in `Costs`."""


class RolloutPool(ABC):
    """Workers of one training process. `num_steps` is the number of training steps of the run."""

    def __init__(self, cfg: RolloutWorkers, num_steps: int, num_workers: int):
        self.cfg, self.num_steps, self.num_workers = cfg, num_steps, num_workers
        self.metrics: dict[str, float] = {}
        """Staleness of the collected rollouts, waiting time and utilization."""
        self._requested: int | None = None
        self._version = 0
        self._since: float | None = None
        self._waited = self._busy = 0.0

    @property
    def is_off_policy(self) -> bool:
        """Return whether the collected rollouts have older weights."""
        return self.metrics["rollout/staleness"] > 0

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
            answer = self.collect(number)
            self._waited += time.perf_counter() - start
            self._busy += answer.seconds
            for name, count in answer.costs.items():
                setattr(costs, name, getattr(costs, name) + count)
            if number == len(parts) - 1:  # a caller may not run the generator to its end
                self._measure(step, version)
                if self.cfg.max_staleness and step + 1 < self.num_steps:
                    self._request(step + 1, step, parts, learner)
            yield answer.tensors

    def divide(self, places: Sequence[int], size: int | None = None) -> list[Sequence[int]]:
        """Return parts of at most `size` indices; None: one part for each worker."""
        size = size or ceil(len(places) / self.num_workers)
        return [places[start : start + size] for start in range(0, len(places), size)]

    @abstractmethod
    def begin(self, step: int, parts: Sequence[Sequence[int]], learner: Learner) -> None:
        """Send the learner's current weights, and start to sample the parts of a step."""

    @abstractmethod
    def collect(self, number: int) -> Answer:
        """Wait for the rollouts of a part of the step that began last."""

    @abstractmethod
    def close(self) -> None:
        """End the work of all workers."""

    def _request(
        self, step: int, version: int, parts: Sequence[Sequence[int]], learner: Learner
    ) -> None:
        """Begin a step with the current weights, which `version` steps have trained."""
        self.begin(step, parts, learner)
        self._requested, self._version = step, version

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
            self.metrics["utilization/workers"] = self._busy / (now - since) / self.num_workers
        self._since, self._waited, self._busy = now, 0.0, 0.0
