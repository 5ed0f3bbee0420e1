"""Losses of the weighted reward, for training with reward gradients."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from flowalign.utils.ranges import FiniteFloat


class RewardLoss(ABC):
    """Map from weighted rewards to losses."""

    @abstractmethod
    def __call__(self, reward: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        """Return the loss of each sample."""


@dataclass(frozen=True, kw_only=True)
class Maximise(RewardLoss):
    """Negative reward. Source: DRaFT, arXiv:2309.17400."""

    def __call__(self, reward: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        """Return -reward."""
        return -reward


@dataclass(frozen=True, kw_only=True)
class Margin(RewardLoss):
    """Hinge relu(margin - reward), which is 0 for samples with a sufficient reward.

    Source: ReFL, arXiv:2304.05977, with margin 2 for ImageReward; FlowBP, arXiv:2606.11075, with
    0.55 and SRPO, arXiv:2509.06942, with 0.7 for HPSv2.1.
    """

    margin: FiniteFloat
    """Reward above which a sample has no gradient."""

    def __call__(self, reward: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        """Return relu(margin - reward)."""
        return (self.margin - reward).relu()


@dataclass(frozen=True, kw_only=True)
class Distance(RewardLoss):
    """Distance |reward - target|. Source: AlignProp, arXiv:2310.03739, with 10 for aesthetics."""

    target: FiniteFloat
    """Desired reward."""

    def __call__(self, reward: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        """Return |reward - target|."""
        return (reward - self.target).abs()
