"""Reference models and averages of the policy that losses compare it with.

The reference is the initial model, an average, a periodic copy, or a teacher. Further averages of
the policy serve as old policies, which can generate samples, and as anchors.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.training.checkpoint import check_start
from flowalign.training.learner import Learner
from flowalign.training.reference import (
    EMA,
    Ramp,
    WeightOverride,
    check_guidance,
    find_scale,
    guide,
)
from flowalign.types import Policy, VelocityField
from flowalign.utils.ranges import Decay, GuidanceScale, PositiveInt, Settings, require_ranges

AverageName = Literal["reference", "old", "anchor", "behaviour"]
"""Name of an average of the policy's weights in `Learner.averages`. old: the old policy of a loss.
anchor: the average that a loss keeps the policy close to. behaviour: only used for sampling."""


@dataclass(frozen=True, kw_only=True)
class Average:
    """Average of the policy's weights on a schedule; it starts as a copy of the initial policy."""

    decay: Decay | Ramp = 0.0
    """Decay of the average: a number in [0, 1), or a ramp over the averagings. 0: a copy."""
    per: Literal["update", "step"] = "step"
    """Interval of the averaging. update: after every optimizer update. step: after every training
    step, so that the policy is compared with the weights that sampled the step's data."""

    def __post_init__(self) -> None:
        """Reject a decay outside [0, 1)."""
        require_ranges(self, type(self).__name__)

    def follow(self, learner: Learner, name: AverageName) -> VelocityField:
        """Average the parameters from now on, and return the average's velocity field.

        The learner also stores the field under `name`.
        """
        d = self.decay
        ramp = d if isinstance(d, Ramp) else Ramp(start=d, highest=d)
        learner.fields[name] = learner.keep_average(name, ramp.at, per=self.per)
        return learner.fields[name]


class ReferenceModel(ABC):
    """Reference model of a run."""

    equals_policy: ClassVar[bool]
    """Whether policy and reference are equal before the first update."""

    @property
    def weight_copies(self) -> int:
        """Return the number of additional copies of the trained weights in memory."""
        return 1

    def count_evaluations(self, policy: Policy) -> int:  # noqa: ARG002
        """Return the number of network evaluations per row."""
        return 1

    def check(self, policy: Policy) -> None:  # noqa: B027
        """Raise ValueError if the policy does not support this reference."""

    @abstractmethod
    def field(self, learner: Learner) -> VelocityField:
        """Return the reference's velocity field; called once, before any update or resumption."""


@dataclass(frozen=True)
class FrozenBase(ReferenceModel):
    """Initial model: the policy with its adapter disabled, or a frozen copy without adapters."""

    equals_policy = True  # a fresh adapter is zero

    @property
    @override
    def weight_copies(self) -> int:
        """Return 0, because the copy for full fine-tuning is counted with the network."""
        return 0

    @override
    def field(self, learner: Learner) -> VelocityField:
        """Return the reference that a learner starts with."""
        return learner.reference


@dataclass(frozen=True, kw_only=True)
class EMAReference(ReferenceModel, Average):
    """Exponential moving average of the policy.

    Source: Linear-DPO, arXiv:2605.21123, decays 0.95 to 0.995 after each update. DGPO's reference,
    arXiv:2510.08425, stays the initial model for 200 steps, which is a ramp with start 1 and flat
    200.
    """

    equals_policy = True  # the average starts as a copy
    decay: Decay | Ramp = 0.99
    """Decay of the average: a number in [0, 1), or a ramp over the averagings."""
    per: Literal["update", "step"] = "update"
    """Interval of the averaging. update: after every optimizer update. step: after every training
    step."""

    @override
    def field(self, learner: Learner) -> VelocityField:
        """Average the parameters from now on."""
        return self.follow(learner, "reference")


@dataclass(frozen=True, kw_only=True)
class PeriodicCopy(ReferenceModel, Settings, key="reference"):
    """Copy of the policy that is renewed every `every` updates (iterative DPO)."""

    equals_policy = True  # the reference starts as a copy
    every: PositiveInt = 40
    """Number of updates between two copies."""

    @override
    def field(self, learner: Learner) -> VelocityField:
        """Copy the parameters periodically, as an average with decay 0."""
        return learner.keep_average("reference", 0.0, self.every)


@dataclass(frozen=True, kw_only=True)
class Teacher(ReferenceModel):
    """Trained weights of the same architecture, from a checkpoint."""

    equals_policy = False
    path: str
    """Folder of the checkpoint."""

    @override
    def check(self, policy: Policy) -> None:
        check_start(self.path, "recipe.teachers")

    @override
    def field(self, learner: Learner) -> VelocityField:
        """Load the teacher's weights; raise ValueError for weights of another model."""
        # The checkpoint is loaded into the policy, so the policy's weights are saved first.
        own = EMA(learner.parameters, 0.0)
        learner.policy.load_weights(self.path)
        teacher = EMA(learner.parameters, 0.0)
        own.write()
        return WeightOverride(learner.policy, teacher)


@dataclass(frozen=True, kw_only=True)
class GuidedReference(ReferenceModel):
    """Another reference with classifier-free guidance, at two evaluations per row.

    Guidance away from the empty prompt is added here, even if the policy samples without guidance.
    Source: CRD, arXiv:2603.14128, with a KL to the base model with guidance 4.5.
    """

    equals_policy = False  # losses evaluate the policy without guidance
    guidance: GuidanceScale = 4.5
    """Guidance scale of the reference, above 1. model: the scale of the policy's run file; a model
    without guidance stays unguided."""
    inner: ReferenceModel = field(default_factory=FrozenBase)
    """Reference that is guided. Default: the initial model."""

    def __post_init__(self) -> None:
        """Reject a scale of at most 1, and nested guidance."""
        if self.guidance != "model" and not self.guidance > 1:
            raise ValueError(f"reference.guidance is {self.guidance}; it must be above 1")
        if isinstance(self.inner, GuidedReference):
            raise ValueError("reference.inner is a GuidedReference; use its own inner reference")

    @property
    @override
    def weight_copies(self) -> int:
        return self.inner.weight_copies

    @override
    def count_evaluations(self, policy: Policy) -> int:
        return 1 + (find_scale(policy, self.guidance) > 1)

    @override
    def check(self, policy: Policy) -> None:
        check_guidance(policy, find_scale(policy, self.guidance), "recipe.reference.guidance")
        self.inner.check(policy)

    @override
    def field(self, learner: Learner) -> VelocityField:
        """Return the guided inner reference; raise ValueError for a policy without guidance."""
        return guide(self.inner.field(learner), learner.policy, self.guidance)


ColdStart = Literal["policy", "average", "merge"]
"""Initial weights of a run. policy: the policy's own. average: the mean of the teachers' trained
parameters. merge: adapters with an update closest to the mean of the teachers' updates."""
_DOWN, _UP = ".lora_A.", ".lora_B."


@torch.no_grad()
def start_from(how: ColdStart, learner: Learner, paths: Sequence[str]) -> None:
    """Set the policy's trained parameters from the teachers, and restart the averages.

    Source: Flow-OPD, arXiv:2605.08063. Its best cold start merges the teachers' adapters; our
    merging method is a reconstruction.

    Raises:
        ValueError: A teacher belongs to another model, or there are no adapters to merge.
    """
    taught: list[dict[str, Tensor]] = []
    for path in paths:
        learner.policy.load_weights(path)
        taught.append({name: p.detach().clone() for name, p in learner.named.items()})
    mean = {name: torch.stack([one[name] for one in taught]).mean(0) for name in learner.named}
    for name, value in (mean if how == "average" else mean | _merge_adapters(taught)).items():
        learner.named[name].copy_(value)
    for average in learner.averages.values():
        average.restart()


def _merge_adapters(taught: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the merged factors of all adapters."""
    downs = [name for name in taught[0] if _DOWN in name]
    if not downs:
        remedy = "set policy.lora, or take average"
        raise ValueError(f"recipe.cold_start is merge, but the policy trains no LoRA: {remedy}")
    found: dict[str, Tensor] = {}
    for name in downs:
        other = name.replace(_DOWN, _UP)
        pairs = [one[name] for one in taught], [one[other] for one in taught]
        found[name], found[other] = merge_factors(*pairs)
    return found


def merge_factors(
    down: Sequence[Float[Tensor, "r i"]], up: Sequence[Float[Tensor, "o r"]]
) -> tuple[Float[Tensor, "r i"], Float[Tensor, "o r"]]:
    """Return factors of rank r with the product nearest to the mean of the products up @ down.

    Averaging the factors would be wrong, because it multiplies the `up` of one update with the
    `down` of another. The singular values are divided evenly between both factors.
    """
    rank = len(down[0])
    wide = torch.cat(list(down)).double()
    tall = torch.cat(list(up), dim=1).double() / len(up)
    # The product is as large as the weight; its SVD follows from that of a small matrix.
    inner, mix = torch.linalg.qr(tall)
    u, s, v = torch.linalg.svd(mix @ wide, full_matrices=False)
    root = s[:rank].sqrt()
    return _padded(root[:, None] * v[:rank], down[0]), _padded((inner @ u[:, :rank]) * root, up[0])


def _padded(part: Tensor, like: Tensor) -> Tensor:
    """Return a factor padded with zeros to the shape and dtype of `like`."""
    out = torch.zeros_like(like)
    out[: part.shape[0], : part.shape[1]] = part
    return out
