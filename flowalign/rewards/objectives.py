"""Define recipe components that combine reward dimensions in other ways than a weighted sum."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.rewards.combine import (
    Bound,
    Multipliers,
    RelativeForm,
    centre_log_sigmoid,
    ramp,
    relative_reward,
    valid_mean,
)
from flowalign.rewards.composite import Rewards
from flowalign.types import (
    LatentReward,
    MediaBatch,
    PastOutcomes,
    Request,
    RewardOutput,
    Trajectory,
    ValueFunction,
    insert_words,
)
from flowalign.types.trajectory import Completion
from flowalign.utils.errors import require_known
from flowalign.utils.ranges import Decay, FiniteFloat, PositiveFloat, require_ranges


@dataclass(frozen=True, kw_only=True)
class LogSigmoidCentred:
    """Transform of each weighted reward to log sigmoid((reward - reference) / scale).

    Rewards above the reference saturate, so the worst dimension dominates. Use the transform with
    `advantages.combine: advantage_of_sum`, because the sum is the log-probability of being good in
    all dimensions.

    Source: arXiv:2402.00742.
    """

    reference: Mapping[str, FiniteFloat] = field(default_factory=dict)
    """Reward that is good enough, per weighted dimension; for example a quantile of the untrained
    model's rewards."""
    reference_columns: Mapping[str, str] = field(default_factory=dict)
    """Metadata column with the reference of each request, for dimensions without a common
    reference; for example the mean reward of the untrained model on the same request."""
    scale: PositiveFloat = 1.0
    """Reward units per logit: 1 for a Bradley-Terry model, less for rewards in [0, 1]."""

    def __post_init__(self) -> None:
        """Reject a scale of 0 or below, which would reverse preferences."""
        require_ranges(self, "value_transform")

    def check(self, rewards: Rewards) -> None:
        """Raise ValueError unless exactly the weighted dimensions have a reference."""
        named = sorted([*self.reference, *self.reference_columns])
        if sorted(rewards.weighted_dims) != named:
            raise ValueError(
                f"value_transform.reference and reference_columns name {', '.join(named) or 'none'}"
                f"; they must name each of {', '.join(sorted(rewards.weighted_dims))} once"
            )

    def check_requests(self, located: Iterable[tuple[str, Request]]) -> None:
        """Raise ValueError for the first request without a number in a reference column."""
        for where, request in located:
            for dim, column in self.reference_columns.items():
                found = request.metadata.get(column)
                if not _is_number(found):
                    raise ValueError(
                        f"{where}: {column} is {found!r}; value_transform.reference_columns needs "
                        f"a number, the reward {dim} that is good enough for this request"
                    )

    def __call__(
        self, values: Float[Tensor, "n *m R"], dims: Sequence[str], requests: Sequence[Request]
    ) -> Float[Tensor, "n *m R"]:
        """Return the values with the referenced dimensions transformed; NaN stays NaN."""
        rows = [[self._reference(dim, request) for dim in dims] for request in requests]
        centre = values.new_tensor(rows).reshape(len(rows), *[1] * (values.ndim - 2), len(dims))
        flat, centre = values.flatten(0, -2), centre.expand_as(values).flatten(0, -2)
        moved = centre_log_sigmoid(flat / self.scale, flat.isfinite(), centre / self.scale)
        named = [dim in self.reference or dim in self.reference_columns for dim in dims]
        return torch.where(torch.tensor(named), moved, flat).view_as(values)

    def _reference(self, dim: str, request: Request) -> float:
        if dim in self.reference_columns:
            return float(request.metadata[self.reference_columns[dim]])
        return self.reference.get(dim, 0.0)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value)


class TransformedValues(ValueFunction):
    """State values with transformed rewards, for a credit method."""

    def __init__(
        self,
        values: ValueFunction,
        dims: Sequence[str],
        transform: LogSigmoidCentred,
        trajectory: Trajectory,
    ):
        self.values, self.dims, self.transform = values, dims, transform
        self.trajectory = trajectory

    def __call__(self, ks: Sequence[int], how: Completion | None = None) -> Tensor:
        """Return the transformed values of states `ks`; see `ValueFunction`."""
        return self.transform(self.values(ks, how), self.dims, self.trajectory.requests)

    def past(self, num_steps: int) -> PastOutcomes | None:
        """Return transformed earlier outcomes."""
        known = self.values.past(num_steps)
        if known is None:
            return None
        asked = self.trajectory.requests[:: self.trajectory.group_size]
        of_each = [asked[i] for i in known.prompt.tolist()]
        return known._replace(value=self.transform(known.value, self.dims, of_each))

    def predicted(self, ks: Sequence[int]) -> Tensor:
        """Return the critic's predictions, which already are transformed rewards."""
        return self.values.predicted(ks)

    def scored(self, ks: Sequence[int], reward: LatentReward) -> Tensor:
        """Return the scores of a latent reward, not transformed because its units differ."""
        return self.values.scored(ks, reward)


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Thresholds of reward dimensions, enforced by adaptive weights.

    The weight of each dimension in `at` is multiplied by a Lagrange multiplier, which is updated
    after every step: it grows while the mean reward is below the threshold.

    Source: constrained RLHF, arXiv:2310.04373. Its multipliers also weight the KL; here the KL
    keeps the coefficient of the algorithm.
    """

    at: Mapping[str, FiniteFloat]
    """Target of the mean reward, by dimension."""
    bound: Bound = "at_least"
    """Effect above the threshold. at_least: the weight of the dimension decays. near: the dimension
    is pushed back."""
    rate: PositiveFloat = 0.1
    """Learning rate of the multipliers, above 0."""
    momentum: Decay = 0.1
    """Momentum of the multiplier updates, in [0, 1)."""

    def __post_init__(self) -> None:
        """Reject missing thresholds, and settings outside their ranges."""
        require_ranges(self, "thresholds")
        if not self.at:
            raise ValueError("thresholds.at is empty; give the threshold of at least one dimension")

    def check(self, rewards: Rewards) -> None:
        """Raise ValueError for a dimension that is unknown or has no weight."""
        what = "thresholds.at needs weighted dimensions, not"
        require_known(what, self.at, rewards.weighted_dims)

    def start(self, dims: Sequence[str]) -> Multipliers:
        """Return the initial multipliers; dimensions without a threshold have threshold NaN."""
        at = torch.tensor([self.at.get(dim, torch.nan) for dim in dims])
        return Multipliers.start(at, self.bound)

    def after(self, multipliers: Multipliers, final: Float[Tensor, "n R"]) -> Multipliers:
        """Return the multipliers after a step.

        `final` has the rewards of the finished samples of all processes.
        """
        mean = valid_mean(final, final.isfinite())
        mean = mean.masked_fill(multipliers.thresholds.isnan(), torch.nan)
        return multipliers.update(mean, self.rate, self.momentum)


@dataclass(frozen=True, kw_only=True)
class ControlWords:
    """Relative score of media under "wanted word. prompt" and "unwanted word. prompt".

    Preferences of the reward that do not depend on the words cancel. The defaults match the
    released HPSv2.1 run.

    Source: SRPO, arXiv:2509.06942; its code, Tencent-Hunyuan/SRPO.
    """

    wanted: list[str] = field(
        default_factory=lambda: ["Natural-lighting", "Detail", "Detailed", "Real"]
    )
    """Wanted words; each step takes the next one."""
    unwanted: list[str] = field(
        default_factory=lambda: ["Concept art", "Painting", "Anime", "Flat", "Oil"]
    )
    """Unwanted words to compare with; each step takes the next one."""
    form: RelativeForm = "released"
    """Combination of the two scores. released: (1 + k) wanted - unwanted, from the authors' code.
    difference: wanted - unwanted. guided: (1 - k) unwanted + k wanted. The last two are from the
    paper."""
    k: tuple[FiniteFloat, FiniteFloat] = (0.1, 0.25)
    """Values of k at the lowest and at the highest noise level of the gradient path's range."""
    k_inverted: tuple[FiniteFloat, FiniteFloat] = (0.3, 0.01)
    """Values of k for latents that were reached by adding noise; their words are swapped."""

    def __post_init__(self) -> None:
        """Raise ValueError for a list without words."""
        require_ranges(self, "recipe.relative")
        for name, words in (("wanted", self.wanted), ("unwanted", self.unwanted)):
            if not words or not all(words):
                raise ValueError(f"recipe.relative.{name} is {words}; give at least one word")

    def check(self, rewards: Rewards) -> None:
        """Raise ValueError if a weighted reward does not read prompts."""
        deaf = [m.spec.name for m in rewards.weighted().models if "prompt" not in m.spec.needs]
        if deaf:
            raise ValueError(
                f"recipe.relative compares prompts, which reward {deaf[0]!r} does not read: "
                "set it to null, or weigh rewards that need a prompt"
            )

    def score(
        self, rewards: Rewards, batch: MediaBatch, step: int, inverted: bool, place: float
    ) -> RewardOutput:
        """Return relative scores, with a gradient to the media.

        `place` in [0, 1] is the position of the noise level in the gradient path's range.
        """
        words = self.wanted[step % len(self.wanted)], self.unwanted[step % len(self.unwanted)]
        first, second = (
            rewards.score_with_gradient(
                replace(
                    batch,
                    prompts=[insert_words("{words}. {prompt}", p, [word]) for p in batch.prompts],
                )
            )
            for word in (reversed(words) if inverted else words)
        )
        k = ramp(self.k_inverted if inverted else self.k, place)
        return RewardOutput(
            relative_reward(first.values, second.values, k, self.form),
            first.valid & second.valid,
            {**second.reasons, **first.reasons},
        )
