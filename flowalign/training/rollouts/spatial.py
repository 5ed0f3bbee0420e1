"""Distribute advantages over latent positions, by maps of rewards or of attention.

advantages [B, T] -> maps of the samples -> advantages [B, T, 1, *grid]
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import interpolate
from typing_extensions import override

from flowalign.functional.maps import average_on_grid, normalise_mean
from flowalign.functional.places import (
    add_places,
    compare_places,
    spread_places,
    weigh_places,
)
from flowalign.rewards.composite import Rewards
from flowalign.sampling.attention import record_prompt_attention
from flowalign.training.reference import conditional
from flowalign.training.rollouts.state_values import CompletionValues
from flowalign.types.ranges import UnitInterval, require_ranges


class SpatialCredit(ABC):
    """Method that gives every latent position of every sample an advantage."""

    blend: UnitInterval
    """Share of the map in the advantage. 0: the sample's advantage at all places."""

    def __post_init__(self) -> None:
        """Reject settings outside their ranges."""
        require_ranges(self, "spatial")

    @abstractmethod
    def check(self, key: str, rewards: Rewards) -> None:
        """Raise ValueError if the rewards of a run do not fit; `key` is for messages."""

    @property
    @abstractmethod
    def evaluations(self) -> int:
        """Return the number of further network evaluations per sample and trained step."""

    def __call__(
        self, advantage: Float[Tensor, "B T"], values: CompletionValues
    ) -> Float[Tensor, "B T 1 *grid"]:
        """Return the advantage of each transition at each place."""
        trajectory = values.trajectory
        grid = tuple(trajectory.unique_states(trajectory.num_steps).shape[2:])
        return self.spread(advantage, values, grid)

    @abstractmethod
    def spread(
        self, advantage: Float[Tensor, "B T"], values: CompletionValues, grid: tuple[int, ...]
    ) -> Float[Tensor, "B T 1 *grid"]:
        """Return the advantages of the places of a latent grid, for a blend above 0."""


@dataclass(frozen=True, kw_only=True)
class RewardMap(SpatialCredit):
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

    @override
    def check(self, key: str, rewards: Rewards) -> None:
        mapping = [model.spec.name for model in rewards.models if model.spec.maps]
        if self.reward not in mapping:
            raise ValueError(
                f"{key}.reward is {self.reward!r}; rewards with a map here: "
                f"{', '.join(mapping) or 'none, take one such as reward_models.RegionReward'}"
            )

    @property
    @override
    def evaluations(self) -> int:
        """Return 0, because the reward is computed anyway."""
        return 0

    @override
    def spread(
        self, advantage: Float[Tensor, "B T"], values: CompletionValues, grid: tuple[int, ...]
    ) -> Float[Tensor, "B T 1 *grid"]:
        maps = average_on_grid(values.outcome_map(self.reward), grid)
        if self.mode == "weight":
            worst = maps.amax(tuple(range(1, maps.ndim)), keepdim=True) - maps
            return weigh_places(advantage, normalise_mean(maps), normalise_mean(worst), self.blend)
        return add_places(advantage, compare_places(maps, values.trajectory.group_size), self.blend)


@dataclass(frozen=True, kw_only=True)
class AttentionMap(SpatialCredit):
    """Advantages of places by their attention to the prompt, at each trained step (STAR).

    The weights are the share of a token's attention that goes to the prompt, averaged over heads
    and blocks, with mean 1 over places. A reconstruction of STAR, arXiv:2606.17979, whose abstract
    is public only: layers, tokens and normalisation are our choice.
    """

    blend: UnitInterval = 1.0
    """Share of the weights in the advantage. 0: the sample's advantage at all places."""

    @override
    def check(self, key: str, rewards: Rewards) -> None:
        """Accept any rewards."""

    @property
    @override
    def evaluations(self) -> int:
        """Return 1, because the attention of a state is computed again."""
        return 1

    @override
    def spread(
        self, advantage: Float[Tensor, "B T"], values: CompletionValues, grid: tuple[int, ...]
    ) -> Float[Tensor, "B T 1 *grid"]:
        weight = torch.ones(*advantage.shape, 1, *grid)
        for k in values.trajectory.trained.any(0).nonzero()[:, 0].tolist():
            weight[:, k] = _attention_at(values, k, grid)
        return spread_places(advantage, weight, self.blend)


def _attention_at(
    values: CompletionValues, k: int, grid: tuple[int, ...]
) -> Float[Tensor, "B 1 *grid"]:
    """Return the attention of state k to the prompt on the latent grid, with mean 1."""
    trajectory, found = values.trajectory, []
    for rows in torch.arange(len(trajectory.requests)).split(values.micro_batch):
        x = trajectory.state(k, rows)
        prompt = trajectory.prompt[rows].to(x.device)
        cond = {name: value[prompt] for name, value in trajectory.cond.items()}
        with torch.no_grad(), record_prompt_attention(values.policy.denoiser) as seen:
            conditional(values.policy).velocity(x, trajectory.sigmas[k], cond)
        found.append(torch.stack(seen).mean(0).cpu())
    tokens = torch.cat(found)
    patch = round((prod(grid) / tokens.shape[1]) ** 0.5)
    maps = tokens.unflatten(1, [size // patch for size in grid])[:, None]
    return normalise_mean(interpolate(maps, size=grid, mode="nearest"))
