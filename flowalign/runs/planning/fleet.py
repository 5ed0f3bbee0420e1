"""Simulate a run on many workers that fail and straggle, event by event.

Rollout workers sample the batch of a step, trainers update on it, and both stages overlap as far as
the allowed staleness permits. A stage ends when its slowest worker does. The effect of staleness on
learning is not simulated.
"""

from dataclasses import dataclass
from math import exp, inf, sqrt

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Workers of a run, and what delays them. All times are in seconds."""

    trainers: int
    """Number of trainers."""
    samplers: int
    """Number of rollout and reward workers. 0: the trainers also sample and score."""
    rollout: float
    """Mean time of a worker for its share of a step's samples and rewards."""
    update: float
    """Mean time of a trainer for an update, with communication."""
    staleness: int = 0
    """Largest number of updates that the weights of a rollout may be behind."""
    spread: float = 0.0
    """Standard deviation of the logarithm of stage times (lognormal, mean as above)."""
    failure: float = inf
    """Mean time between failures of one worker (exponential)."""
    every: int = 1
    """Number of updates between checkpoints."""
    save: float = 0.0
    """Time of a checkpoint, during which trainers wait."""
    restart: float = 0.0
    """Time from a failure until the worker runs again, without further failures."""

    @property
    def workers(self) -> int:
        """Return the number of workers that can fail."""
        return self.trainers + self.samplers


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a simulated run."""

    seconds: float
    """Duration of the run."""
    training: float
    """Seconds in which trainers update, including updates that are repeated."""
    restarts: int
    """Number of failures of trainers. After each, trainers go back to a checkpoint."""
    replaced: int
    """Number of failures of rollout and reward workers. Each one repeats its share."""
    lost: int
    """Number of updates that were repeated."""


def young_interval(save: float, failure: float, workers: int) -> float:
    """Return the seconds between checkpoints that lose least: sqrt(2 x save x failure / workers).

    Source: J. W. Young, A first order approximation to the optimum checkpoint interval (1974).
    """
    return sqrt(2 * save * failure / workers)


def simulate(fleet: Fleet, steps: int, seed: int = 0) -> Outcome:
    """Return the outcome of a run of `steps` updates; equal seeds give equal outcomes."""
    return _Run(fleet, steps, np.random.default_rng(seed)).finish()


class _Run:
    """State of a simulated run: finished rollouts and updates, and the ends of current stages."""

    def __init__(self, fleet: Fleet, steps: int, rng: np.random.Generator):
        self.fleet, self.steps, self.rng = fleet, steps, rng
        self.now, self.sampled, self.updated, self.saved = 0.0, 0, 0, 0
        self.rollout_end = self.update_end = inf
        self.training, self.restarts, self.replaced, self.lost = 0.0, 0, 0, 0
        self.failure = self._draw_failure()

    def finish(self) -> Outcome:
        """Process events until all updates are made and saved."""
        while self.updated < self.steps or self.update_end < inf:
            self._start_stages()
            self.now = min(self.rollout_end, self.update_end, self.failure)
            if self.now == self.failure:
                self._fail()
            elif self.now == self.update_end:
                self._end_update()
            else:
                self.sampled, self.rollout_end = self.sampled + 1, inf
        return Outcome(
            seconds=self.now,
            training=self.training,
            restarts=self.restarts,
            replaced=self.replaced,
            lost=self.lost,
        )

    def _start_stages(self) -> None:
        """Start a rollout if its weights are new enough, and an update if its samples are there."""
        fresh = self.sampled <= self.updated + self.fleet.staleness
        if self.rollout_end == inf and fresh and self.sampled < self.steps:
            samplers = self.fleet.samplers or self.fleet.trainers
            self.rollout_end = self.now + self._draw_slowest(self.fleet.rollout, samplers)
        if self.update_end == inf and self.updated < self.sampled:
            seconds = self._draw_slowest(self.fleet.update, self.fleet.trainers)
            self.training += seconds
            is_saved = (self.updated + 1) % self.fleet.every == 0
            self.update_end = self.now + seconds + (self.fleet.save if is_saved else 0.0)

    def _end_update(self) -> None:
        self.updated, self.update_end = self.updated + 1, inf
        if self.updated % self.fleet.every == 0:
            self.saved = self.updated

    def _fail(self) -> None:
        """Replace a rollout worker, or return all trainers to the last checkpoint."""
        fleet = self.fleet
        if self.rng.random() * fleet.workers < fleet.samplers:
            self.replaced += 1
            if self.rollout_end < inf:
                again = self.now + fleet.restart + self._draw_slowest(fleet.rollout, 1)
                self.rollout_end = max(self.rollout_end, again)
        else:
            self.restarts, self.lost = self.restarts + 1, self.lost + self.updated - self.saved
            self.now += fleet.restart
            self.sampled = self.updated = self.saved
            self.rollout_end = self.update_end = inf
        self.failure = self._draw_failure()

    def _draw_failure(self) -> float:
        if self.fleet.failure == inf:
            return inf
        return self.now + float(self.rng.exponential(self.fleet.failure / self.fleet.workers))

    def _draw_slowest(self, mean: float, workers: int) -> float:
        """Draw the time of the slowest worker of a stage."""
        if self.fleet.spread == 0:
            return mean
        slowest = float(self.rng.standard_normal(workers).max())
        return mean * exp(self.fleet.spread * slowest - self.fleet.spread**2 / 2)
