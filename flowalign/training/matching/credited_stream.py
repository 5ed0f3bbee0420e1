"""Base class of the streams that make examples from credited rollouts of the current policy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from flowalign.data.requests import Requests
from flowalign.rewards.composite import Rewards
from flowalign.training.learner import Learner
from flowalign.training.matching.source import BatchStream
from flowalign.training.rollouts.credited import CreditedRollouts
from flowalign.training.rollouts.rollout_settings import RolloutSettings


@dataclass(eq=False)
class CreditedStream(BatchStream):
    """Stream with credited rollouts, whose state is that of the rollouts."""

    cfg: RolloutSettings
    learner: Learner
    rewards: Rewards
    requests: Requests

    def __post_init__(self) -> None:
        """Prepare the rollouts."""
        seed = self.requests.seed
        self.rollouts = CreditedRollouts(self.cfg, self.learner, self.rewards, seed)

    @override
    def state(self) -> dict[str, Any]:
        return self.rollouts.state()

    @override
    def restore(self, state: Mapping[str, Any]) -> None:
        self.rollouts.restore(state)
