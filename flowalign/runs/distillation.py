"""Weight the noises of RewardSDS by the rewards of a run file."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from flowalign.rewards.checked import RewardFailure
from flowalign.rewards.composite import Rewards
from flowalign.sampling.reward_sds import RewardSDS, Score
from flowalign.types import Request


@dataclass(frozen=True)
class Distillation:
    """Says how latents are optimised in place of being sampled."""

    cfg: RewardSDS
    """Settings of the optimisation."""
    rewards: Rewards
    """Rewards with a weight."""

    def score(self, decode: Callable[[Tensor], Tensor], fps: float | None) -> Score:
        """Return the function that gives latents their weighted reward."""

        def scored(x: Tensor, requests: Sequence[Request]) -> Tensor:
            return self.total(decode(x), requests, fps)

        return scored

    def total(self, media: Tensor, requests: Sequence[Request], fps: float | None) -> Tensor:
        """Return the weighted reward of each medium.

        Raises:
            RewardFailure: A reward could not be computed.
        """
        output = self.rewards.score(self.rewards.batch(media, requests, fps=fps))
        if not (usable := self.rewards.usable(output.valid)).all():
            i = int((~usable).nonzero()[0])
            raise RewardFailure(
                f"a completion of {requests[i].prompt!r} has no reward, which RewardSDS needs: "
                f"{output.reasons.get(i, 'no reason given')}"
            )
        return (output.values.nan_to_num() * self.rewards.weights).sum(1)
