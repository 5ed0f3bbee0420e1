"""Parts of the training of a reward model: settings, the ridge stage, and noise on latents.

Source of the ridge stage: ArmoRM, which fits one regression per attribute and then trains gates
over them.

Source of the noise on latents, which the candidates of a record share: Flow-NRG, arXiv:2501.13918,
trains on pairs with shared noise and level; so do DiNa-LRM, arXiv:2602.11146, and PRFL,
arXiv:2511.21541.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.functional.rating import Features, Rater, ridge
from flowalign.reward_training.labels import Part, Preferences
from flowalign.reward_training.losses import LabelKind, RewardLoss, label_pairs
from flowalign.training.matching.states import Times
from flowalign.types import HeadNetwork, NoisyBackbone
from flowalign.utils.ranges import PositiveFloat, PositiveInt, require_ranges
from flowalign.utils.seeds import generator


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """Named dimension of the reward: its labels, and the loss that reads them."""

    loss: RewardLoss
    labels: LabelKind = "ranks"
    """Kind of labels that the loss learns from."""
    weight: PositiveFloat = 1.0
    """Weight of the loss in the sum over dimensions, above 0."""

    def __post_init__(self) -> None:
        """Reject labels that the loss cannot read, and a weight that is not positive."""
        require_ranges(self, "dimension")
        if self.labels not in self.loss.reads:
            raise ValueError(
                f"{type(self.loss).__name__} reads {' or '.join(self.loss.reads)}, "
                f"not {self.labels}"
            )


@dataclass(frozen=True, kw_only=True)
class Ridge:
    """Settings of the first stage: ridge regression sets the head's linear layer (ArmoRM)."""

    penalties: Sequence[PositiveFloat] = (1e-4, 1e-2, 1.0, 1e2, 1e4)
    """Penalties to try, above 0; the best one on the held-out records is used, per dimension."""
    freeze: bool = True
    """Whether the linear layer is frozen afterwards, so only the gates are trained."""

    def __post_init__(self) -> None:
        """Raise ValueError for penalties of 0 or less."""
        if not self.penalties or min(self.penalties) <= 0:
            raise ValueError(f"ridge.penalties are {list(self.penalties)}; give numbers above 0")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Length and batches of the training of a reward model."""

    epochs: PositiveInt = 20
    """Largest number of epochs."""
    batch_size: PositiveInt = 64
    """Number of records in a minibatch."""
    patience: PositiveInt = 5
    """Number of epochs without a lower held-out loss before training stops; the best epoch is
    kept."""
    ridge: Ridge | None = None
    """Ridge stage before the first epoch. Null: none."""

    def __post_init__(self) -> None:
        """Reject settings outside their ranges."""
        require_ranges(self, "schedule")


@torch.no_grad()
def first_stage(
    cfg: Ridge,
    rater: Rater,
    features: Features,
    preferences: Preferences,
    targets: Float[Tensor, "B m R"],
    dimensions: Sequence[Dimension],
) -> None:
    """Set the rater's linear layer, with the penalty of the lowest error on held-out records.

    Ratings are regressed on features, and comparisons (1, 0, -1) on differences of features.

    Raises:
        ValueError: The head has no linear layer, or one of its dimensions has no label.
    """
    assert isinstance(rater.head, HeadNetwork)
    layer = rater.head.linear_layer()
    if layer is None:
        raise ValueError("ridge needs a head with a layer that is linear in the features")
    linear, dims = layer
    joint = rater.joint(features.joint)
    for row, d in enumerate(dims):
        kind = dimensions[d].labels
        x, y = _problem(joint, preferences, targets[..., d], kind, "train")
        x_held, y_held = _problem(joint, preferences, targets[..., d], kind, "held_out")
        if not len(y) or not len(y_held):
            raise ValueError(f"ridge: dimension {d} has no label to train on or none held out")
        fits = [ridge(x, y, penalty) for penalty in cfg.penalties]
        errors = [float((x_held @ w + b - y_held).square().mean()) for w, b in fits]
        weight, bias = fits[errors.index(min(errors))]
        linear.weight[row], linear.bias[row] = weight, bias
    linear.requires_grad_(not cfg.freeze)


def _problem(
    joint: Float[Tensor, "M D"],
    preferences: Preferences,
    targets: Float[Tensor, "B m"],
    kind: LabelKind,
    part: Part,
) -> tuple[Float[Tensor, "n D"], Float[Tensor, "n"]]:
    rows = preferences.rows(part)
    candidate, labels = preferences.candidate[rows], targets[rows]
    if kind == "ratings":
        given = labels.isfinite()
        return joint[candidate[given]], labels[given]
    pairs = label_pairs(labels, kind)
    x = joint[candidate[pairs.record, pairs.a]] - joint[candidate[pairs.record, pairs.b]]
    y = 2 * pairs.target - 1
    return torch.cat([x, -x]), torch.cat([y, -y])  # both orders: no intercept


_RECORDS_AT_ONCE = 256


@dataclass(frozen=True)
class NoisedFeatures:
    """Features of clean latents at randomly drawn noise levels."""

    backbone: NoisyBackbone
    clean: Features
    """Clean latents and conditioning of all samples."""
    preferences: Preferences
    """Records; the candidates of each share noise and level."""
    times: Times
    """Distribution of the noise levels."""
    seed: int

    def draw(self, samples: Int[Tensor, "k"], update: int) -> Features:
        """Return features of `samples` with the noise of an update."""
        return self._add_noise(samples, generator(self.seed, "noise", update))

    def draw_held_out(self) -> Features:
        """Return features of all samples, with one fixed draw of noise per record."""
        drawn, parts = generator(self.seed, "held noise"), []
        record = self._record()
        for some in torch.arange(len(self.preferences.candidate)).split(_RECORDS_AT_ONCE):
            samples = ((record >= some[0]) & (record <= some[-1])).nonzero().flatten()
            parts.append(self._add_noise(samples, drawn))
        joint = torch.cat([part.joint for part in parts])
        return Features(joint, torch.cat([part.prompt for part in parts]))

    def _add_noise(self, samples: Int[Tensor, "k"], drawn: torch.Generator) -> Features:
        records, place = self._record()[samples].unique(return_inverse=True)
        sigma = self.times.draw(len(records), self.backbone.policy, drawn)
        noise = torch.randn(len(records), self.clean.joint.shape[1], generator=drawn)
        clean = self.clean.take(samples)
        return self.backbone.add_noise(clean, sigma[place], noise[place]).to(torch.device("cpu"))

    def _record(self) -> Int[Tensor, "n"]:
        """Return the record of each sample; samples are in the order of the records."""
        return (self.preferences.candidate >= 0).nonzero()[:, 0]
