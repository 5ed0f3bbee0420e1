"""Define the settings of training by a reward that is refreshed on the policy's rollouts."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from flowalign.rewards.checked import OnFailure, check_spec
from flowalign.training.learner import Optimizer
from flowalign.training.recipe import Recipe
from flowalign.types import RewardModel
from flowalign.types.ranges import NonNegativeFloat, PositiveInt, require_ranges


@dataclass(frozen=True, kw_only=True)
class OnlineRewardSettings:
    """Inner recipe, and the refreshment of the head of its learned reward."""

    inner: Recipe
    """Kind of training, whose rollouts are compared in groups."""
    trusted: RewardModel
    """Slow reward that is asked for few rollouts, such as a verifier or a judge."""
    dims: Mapping[str, str]
    """Dimension of `trusted` that each dimension of the learned reward learns, by the name of the
    latter. All of them are of one reward model, whose head can be trained."""
    every: PositiveInt = 1
    """Steps of the loop between two refreshments."""
    groups: PositiveInt = 4
    """Groups of a step that are scored by `trusted`, over all processes; at least one of each."""
    head_updates: PositiveInt = 4
    """Updates of the head in a refreshment, each on all of its pairs."""
    min_gap: NonNegativeFloat = 0.0
    """Difference of trusted scores above which two samples are a pair."""
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(learning_rate=1e-3))
    """AdamW of the head."""
    micro_batch: int = field(init=False)
    """That of the inner recipe."""
    on_failed_reward: OnFailure = field(init=False)
    """That of the inner recipe, also for `trusted`."""

    def __post_init__(self) -> None:
        """Reject settings that no run can use, before anything heavy is loaded."""
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
