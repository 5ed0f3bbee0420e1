"""Sample rollouts in separate processes, which get the trained weights at each step."""

from flowalign.training.workers.rollout_pool import RolloutPool
from flowalign.training.workers.worker_pool import WorkerPool
from flowalign.training.workers.worker_settings import RolloutWorkers

__all__ = ["RolloutPool", "RolloutWorkers", "WorkerPool"]
