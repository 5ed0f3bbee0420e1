"""Train with reward gradients, through decoded samples to chosen steps of cached rollouts."""

from flowalign.training.reward_gradient.reward_gradient_recipe import RewardGradient
from flowalign.training.reward_gradient.start import (
    FromNoisyRollouts,
    FromPhotos,
    FromRollouts,
    Start,
)

__all__ = ["FromNoisyRollouts", "FromPhotos", "FromRollouts", "RewardGradient", "Start"]
