"""Define the settings of training with a reward that is refreshed on the policy's rollouts."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from flowalign.rewards.checked import OnFailure, check_spec
from flowalign.training.learner import Optimizer
from flowalign.training.recipe import Recipe
from flowalign.types import RewardModel
from flowalign.types.ranges import NonNegativeFloat, PositiveInt, require_ranges


@dataclass(frozen=True, kw_only=True)
class OnlineRewardSettings:
    """Settings of the inner recipe, and of refreshing the head of its learned reward."""

    inner: Recipe
    """Recipe that trains the policy; it must sample groups per prompt."""
    trusted: RewardModel
    """Trusted but slow reward model, such as a verifier or a judge, which scores few rollouts."""
    dims: Mapping[str, str]
    """Map from each refreshed dimension of the learned reward to the dimension of `trusted` that it
    is trained on. All refreshed dimensions must belong to one reward model with a trainable
    head."""
    every: PositiveInt = 1
    """Number of training steps between two refreshes."""
    groups: PositiveInt = 4
    """Number of groups per step that `trusted` scores, over all processes; at least one per
    process."""
    head_updates: PositiveInt = 4
    """Number of updates of the head per refresh, each on all pairs."""
    min_gap: NonNegativeFloat = 0.0
    """Difference of trusted scores above which two samples form a pair."""
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(learning_rate=1e-3))
    """AdamW of the head."""
    micro_batch: int = field(init=False)
    """Micro-batch of the inner recipe."""
    on_failed_reward: OnFailure = field(init=False)
    """Action after a failed reward, from the inner recipe; it also applies to `trusted`."""

    def __post_init__(self) -> None:
        """Reject invalid settings before any model is loaded."""
        require_ranges(self, "recipe")
        object.__setattr__(self, "micro_batch", self.inner.micro_batch)
        object.__setattr__(self, "on_failed_reward", self.inner.on_failed_reward)
        check_spec(self.trusted)
        known = self.trusted.spec.dims
        if missing := [dim for dim in self.dims.values() if dim not in known]:
            raise ValueError(
                f"recipe.dims names {missing[0]}, which recipe.trusted does not score: it has "
                f"{', '.join(known)}"
            )
