"""Implements the base class of rewards that another process computes."""

from abc import abstractmethod
from typing import final

from flowalign.rewards.reward_client import score_usable
from flowalign.types import Loadable, MediaBatch, RewardModel, RewardOutput, RewardSpec


class OutOfProcessReward(RewardModel, Loadable):
    """Reward whose model another process holds.

    A subclass declares `spec` before that process is reached; `connect` takes over the declaration
    of the model. A batch is sent as a whole, without samples that cannot be scored.
    """

    _connected = False

    @abstractmethod
    def connect(self) -> None:
        """Reach the process; raise ValueError if that is impossible."""

    @abstractmethod
    def request(self, batch: MediaBatch) -> RewardOutput:
        """Return the scores of usable samples; raise RewardGone if the process is lost."""

    @final
    def load(self) -> None:
        """Connect once, and take over the declaration of the model.

        Raises:
            ValueError: The process cannot be reached or started, or gives other dimensions.
        """
        if not self._connected:
            self.connect()
            self._connected = True

    @final
    def score(self, batch: MediaBatch) -> RewardOutput:
        """Score the samples that can be scored; raise RewardGone if the process is lost."""
        self.load()
        return score_usable(self.spec, batch, self.chunk_size(len(batch)), self.request)

    def chunk_size(self, num_samples: int) -> int:
        """Return the number of samples per request, by default all."""
        return num_samples

    def take_over(self, spec: RewardSpec, source: str) -> None:
        """Use the declaration of the model; raise ValueError if it has other dimensions.

        `source` begins the message, such as `the scorer gives`.
        """
        if spec.dims != self.spec.dims:
            declared = ", ".join(self.spec.dims)
            raise ValueError(f"{source} {', '.join(spec.dims)}, not {declared}")
        self.spec = spec
