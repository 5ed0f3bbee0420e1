"""Sample rollouts in separate processes, which get the trained weights at each step."""

from flowalign.training.workers.pool import RolloutWorkers, WorkerPool

__all__ = ["RolloutWorkers", "WorkerPool"]
