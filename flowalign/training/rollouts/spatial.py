"""Distribute advantages over latent positions, by maps of rewards.

advantages [B, T] -> maps of the samples -> advantages [B, T, 1, *grid]
"""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from flowalign.functional.advantage import add_places, compare_places, weigh_places
from flowalign.functional.resizing import average_on_grid, normalise_mean
from flowalign.rewards.composite import Rewards
from flowalign.training.rollouts.state_values import CompletionValues
from flowalign.types.ranges import UnitInterval, require_ranges


@dataclass(frozen=True, kw_only=True)
class RewardMap:
    """Advantages of places by the map of a reward, which may have weight 0.

    SRUM, arXiv:2510.12784, weights errors by such maps; its use in the ratio of GRPO is our choice.
    """

    reward: str
    """Name of a reward model with a map, such as region."""
    mode: Literal["weight", "compare"] = "weight"
    """Use of the map, which is high at good places. weight: a positive advantage is divided over
    places in proportion to the map, and a negative one in proportion to the map's maximum minus
    the map. compare: the map is a reward of each place, compared within the group."""
    blend: UnitInterval = 1.0
    """Share of the map in the advantage. 0: the sample's advantage at all places."""

    def __post_init__(self) -> None:
        """Reject settings outside their ranges."""
        require_ranges(self, "spatial")

    def check(self, key: str, rewards: Rewards) -> None:
        """Raise ValueError if the reward has no map; `key` is for messages."""
        mapping = [model.spec.name for model in rewards.models if model.spec.maps]
        if self.reward not in mapping:
            raise ValueError(
                f"{key}.reward is {self.reward!r}; rewards with a map here: "
                f"{', '.join(mapping) or 'none, take one such as reward_models.RegionReward'}"
            )

    def __call__(
        self, advantage: Float[Tensor, "B T"], values: CompletionValues
    ) -> Float[Tensor, "B T 1 *grid"]:
        """Return the advantage of each transition at each place."""
        trajectory = values.trajectory
        grid = tuple(trajectory.unique_states(trajectory.num_steps).shape[2:])
        maps = average_on_grid(values.outcome_map(self.reward), grid)
        if self.mode == "weight":
            worst = maps.amax(tuple(range(1, maps.ndim)), keepdim=True) - maps
            return weigh_places(advantage, normalise_mean(maps), normalise_mean(worst), self.blend)
        return add_places(advantage, compare_places(maps, trajectory.group_size), self.blend)
