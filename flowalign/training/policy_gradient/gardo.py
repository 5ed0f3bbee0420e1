"""Gate the KL of GRPO by the uncertainty of the reward, and reset its reference (GARDO)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from flowalign.functional.advantage import most_uncertain, reward_uncertainty
from flowalign.rewards.composite import Rewards
from flowalign.training.learner import Learner
from flowalign.utils.errors import require_known
from flowalign.utils.ranges import (
    PositiveFloat,
    PositiveInt,
    Settings,
    UnitInterval,
    require_ranges,
)


@dataclass(frozen=True, kw_only=True)
class UncertaintyGate:
    """KL only for samples that the weighted reward prefers more than auxiliary rewards do.

    The paper also adapts `share` to the batch mean of the uncertainty. This mean is 0 without ties
    (tested), so the share is fixed here. Source: GARDO, arXiv:2512.24138, Eq. (7).
    """

    auxiliary: Sequence[str]
    """Names of reward dimensions without a weight, to compare with. Published: Aesthetic and
    ImageReward."""
    share: UnitInterval = 0.1
    """Share of the samples with a KL; 1: all. Published: 0.1 at the start."""

    def __post_init__(self) -> None:
        """Reject settings outside their ranges, and an empty list."""
        require_ranges(self, "recipe.kl_gate")
        if not self.auxiliary:
            raise ValueError("recipe.kl_gate.auxiliary is empty: name at least one dimension")

    def check(self, rewards: Rewards) -> None:
        """Raise ValueError if an auxiliary dimension is missing or is optimized."""
        free = [dim for dim in rewards.dims if dim not in rewards.weighted_dims]
        require_known(
            "recipe.kl_gate.auxiliary must name rewards without a weight, not", self.auxiliary, free
        )

    def __call__(
        self, outcome: Float[Tensor, "n R"], rewards: Rewards, weights: Float[Tensor, "R"]
    ) -> Bool[Tensor, "n"]:
        """Return the samples with a KL, among the outcomes of all processes."""
        columns = [rewards.dims.index(dim) for dim in self.auxiliary]
        used = weights != 0
        main = outcome[:, used] @ weights[used]
        return most_uncertain(reward_uncertainty(main, outcome[:, columns]), self.share)


@dataclass(frozen=True, kw_only=True)
class ResetReference(Settings, key="recipe.reference"):
    """Reference of the KL that is replaced by the policy when it is too far away or too old.

    Source: GARDO, arXiv:2512.24138, Algorithm 1.
    """

    largest_kl: PositiveFloat = 1e-4
    """KL above which the reference is replaced after a step."""
    every: PositiveInt = 100
    """Number of updates after which the reference is replaced in any case."""

    def follow(self, learner: Learner) -> "MovingReference":
        """Replace the learner's reference by a copy of its weights."""
        learner.fields["reference"] = learner.keep_average("reference", lambda _: 1.0)
        return MovingReference(self, learner)


class MovingReference:
    """Reference of a run, and the update of its last reset."""

    def __init__(self, cfg: ResetReference, learner: Learner):
        self.cfg, self.learner, self.last = cfg, learner, learner.num_updates

    def after_step(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Reset the reference if it is due, and return whether it was reset."""
        kl = metrics.get("kl", 0.0)
        due = kl > self.cfg.largest_kl or self.learner.num_updates - self.last >= self.cfg.every
        if due:
            self.learner.averages["reference"].restart()
            self.last = self.learner.num_updates
        return {"reference_reset": float(due)}

    def state(self) -> dict[str, int]:
        """Return the state for a checkpoint; the weights are kept with the averages."""
        return {"last": self.last}

    def restore(self, state: dict[str, int]) -> None:
        """Restore the state of a checkpoint."""
        self.last = int(state["last"])
