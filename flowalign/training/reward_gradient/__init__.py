"""Train with reward gradients, through decoded samples to chosen steps of cached rollouts."""

from flowalign.training.reward_gradient.recipe import RewardGradient
from flowalign.training.reward_gradient.regulariser import Regulariser
from flowalign.training.reward_gradient.start import FromPhotos, FromRollouts, Start

__all__ = ["FromPhotos", "FromRollouts", "Regulariser", "RewardGradient", "Start"]
