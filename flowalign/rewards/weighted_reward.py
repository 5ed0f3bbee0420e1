"""A reward model and the weights of its dimensions, as a run file lists them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from flowalign.rewards.checked import check_spec
from flowalign.types import RewardModel
from flowalign.utils.inline_components import INLINE


@dataclass(frozen=True)
class WeightedReward:
    """Reward model with the weight of each dimension that is optimized."""

    model: RewardModel = field(metadata=INLINE)
    """Reward model, by dotted path."""
    weight: float | dict[str, float] | None = None
    """Weight per dimension, or one number for a model with one dimension. Dimensions without a
    weight are only logged. Null: all are."""

    @property
    def weight_of(self) -> dict[str, float]:
        """Return the weight of each dimension that has one.

        Raises:
            ValueError: A dimension is unknown, a weight is not finite, or one number is given for
                several dimensions.
        """
        check_spec(self.model)
        dims = self.model.spec.dims
        if not isinstance(self.weight, dict):
            if self.weight is not None and len(dims) > 1:
                raise ValueError(
                    f"rewards: {self._name} has the weight {self.weight} and the dimensions "
                    f"{', '.join(dims)}: give a weight per dimension, weight: {{{dims[0]}: 1.0}}"
                )
            weights = {} if self.weight is None else {dims[0]: self.weight}
        else:
            weights = dict(self.weight)
        if unknown := sorted(weights.keys() - set(dims)):
            raise ValueError(
                f"rewards: {self._name} has no dimensions {unknown} that its weight names; "
                f"there are {', '.join(dims)}"
            )
        if not all(isfinite(value) for value in weights.values()):
            raise ValueError(f"rewards: weights of {self._name} must be finite, got {weights}")
        return weights

    def resolve(self) -> dict[str, Any]:
        """Return the weights as a resolved run file lists them: by dimension."""
        return {"weight": self.weight_of or None}

    @property
    def _name(self) -> str:
        return type(self.model).__name__


def join_weights(rewards: Sequence[WeightedReward]) -> dict[str, float]:
    """Return the weight of each dimension of several rewards."""
    return {dim: value for reward in rewards for dim, value in reward.weight_of.items()}


def read_weights(settings: Mapping[str, Any]) -> dict[str, float]:
    """Return the weight of each dimension that resolved settings of a run give."""
    weights = [reward.get("weight") for reward in settings.get("rewards") or []]
    return {dim: value for one in weights if isinstance(one, dict) for dim, value in one.items()}
