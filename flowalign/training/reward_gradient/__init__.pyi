from .reward_gradient_recipe import RewardGradient as RewardGradient
from .start import (
    FromNoisyRollouts as FromNoisyRollouts,
    FromPhotos as FromPhotos,
    FromRollouts as FromRollouts,
)
