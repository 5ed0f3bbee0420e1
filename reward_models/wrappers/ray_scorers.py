"""Scores on actors of a Ray cluster that all training processes share."""

from typing import Any

from flowalign.rewards.scorer import declare
from flowalign.rewards.scorer_pool import PoolSettings, ScorerPool
from flowalign.types import MediaBatch, NonNegativeInt, PositiveFloat, PositiveInt, RewardOutput
from reward_models.wrappers.out_of_process import OutOfProcessReward


class RayScorers(OutOfProcessReward):
    """Scores with a reward model on `actors` actors of a Ray cluster.

    `reward` is an entry of `rewards:`, a class with its settings. Entries with equal settings share
    the actors, also those of other processes in the cluster. `options` are Ray's options of an
    actor, such as `{num_gpus: 0.5, runtime_env: {pip: [...]}}`. `dims` are needed if the class can
    only be imported there. `address` is that of a running cluster, or auto; null starts one on this
    machine, for a single process.

    An actor gets each batch whole, in float32. It has `timeout` seconds per batch and
    `start_timeout` seconds to load. An actor that dies is restarted, up to `restarts` times, and
    gets the batch again; after that the run ends. There is no gradient.
    """

    def __init__(
        self,
        reward: dict[str, Any],
        actors: PositiveInt = 1,
        options: dict[str, Any] | None = None,
        dims: list[str] | None = None,
        address: str | None = None,
        timeout: PositiveFloat = 600.0,
        start_timeout: PositiveFloat = 1800.0,
        restarts: NonNegativeInt = 3,
    ):
        self.spec = declare(reward, dims)
        self.settings = PoolSettings(
            reward=reward, actors=actors, options=options or {}, restarts=restarts
        )
        self.address, self.timeout, self.start_timeout = address, timeout, start_timeout

    def connect(self) -> None:
        """Start the actors, or connect to them."""
        self._pool = ScorerPool(self.settings, self.address, self.start_timeout)
        self.take_over(self._pool.spec, f"the scorers of {self._pool.name} give")

    def request(self, batch: MediaBatch) -> RewardOutput:
        """Return the scores of the batch from one of the actors."""
        return self._pool.score(self.spec, batch, self.timeout)
