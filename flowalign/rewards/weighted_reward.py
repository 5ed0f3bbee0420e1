"""Pair a reward model with the weights of its dimensions, as listed in a run file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from flowalign.rewards.checked import check_spec
from flowalign.types import FiniteFloat, RewardModel
from flowalign.utils.inline_components import INLINE


@dataclass(frozen=True)
class WeightedReward:
    """Reward model with the weights of its optimised dimensions."""

    model: RewardModel = field(metadata=INLINE)
    """Reward model, by dotted path."""
    weight: FiniteFloat | dict[str, FiniteFloat] | None = None
    """Weight per dimension, or one number for a model with one dimension. Dimensions without a
    weight are only logged. Null: no dimension has a weight."""

    @property
    def weight_of(self) -> dict[str, float]:
        """Return the weights by dimension, without unweighted dimensions.

        Raises:
            ValueError: A dimension is unknown, a weight is not finite, or one number is given for
                several dimensions.
        """
        check_spec(self.model)
        first, *others = dims = self.model.spec.dims
        weights: dict[str, float] = {}
        if isinstance(self.weight, dict):
            weights |= self.weight
        elif self.weight is not None:
            if others:
                raise ValueError(
                    f"rewards: {self._name} has the weight {self.weight} and the dimensions "
                    f"{', '.join(dims)}: give a weight per dimension, weight: {{{first}: 1.0}}"
                )
            weights[first] = self.weight
        if unknown := sorted(weights.keys() - set(dims)):
            raise ValueError(
                f"rewards: {self._name} has no dimensions {unknown} that its weight names; "
                f"there are {', '.join(dims)}"
            )
        if not all(isfinite(value) for value in weights.values()):
            raise ValueError(f"rewards: weights of {self._name} must be finite, got {weights}")
        return weights

    def resolve(self) -> dict[str, Any]:
        """Return the weights by dimension, the format of a resolved run file."""
        return {"weight": self.weight_of or None}

    @property
    def _name(self) -> str:
        return type(self.model).__name__


def join_weights(rewards: Sequence[WeightedReward]) -> dict[str, float]:
    """Return the weight of each dimension of several rewards."""
    return {dim: value for reward in rewards for dim, value in reward.weight_of.items()}


def read_weights(settings: Mapping[str, Any]) -> dict[str, float]:
    """Return the weights by dimension from the resolved settings of a run."""
    weights = [reward.get("weight") for reward in settings.get("rewards") or []]
    return {dim: value for one in weights if isinstance(one, dict) for dim, value in one.items()}
