"""Scores on actors of a Ray cluster that all training processes share."""

from typing import Any

from flowalign.rewards.reward_client import score_usable
from flowalign.rewards.scorer import declare
from flowalign.rewards.scorer_pool import PoolSettings, ScorerPool
from flowalign.types import (
    Loadable,
    MediaBatch,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    RewardModel,
    RewardOutput,
)


class RayScorers(RewardModel, Loadable):
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
        self._pool: ScorerPool | None = None

    def load(self) -> None:
        """Connect to the actors, and take over the declaration of their model.

        Raises:
            ValueError: The actors cannot be started, or give other dimensions.
        """
        if self._pool is not None:
            return
        pool = ScorerPool(self.settings, self.address, self.start_timeout)
        if pool.spec.dims != self.spec.dims:
            raise ValueError(
                f"the scorers of {pool.name} give {', '.join(pool.spec.dims)}, "
                f"not {', '.join(self.spec.dims)}"
            )
        self.spec, self._pool = pool.spec, pool

    def score(self, batch: MediaBatch) -> RewardOutput:
        """Score the batch as a whole; raise RewardGone if no restarts are left."""
        self.load()
        return score_usable(self.spec, batch, len(batch), self._ask)

    def _ask(self, batch: MediaBatch) -> RewardOutput:
        assert self._pool is not None, "load has connected"
        return self._pool.score(self.spec, batch, self.timeout)
