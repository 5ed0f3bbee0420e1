"""Run the first stage of training: ridge regression of labels on frozen features.

Source: ArmoRM, which fits one regression per attribute and then trains gates over them.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.functional.rating import Features, Rater, ridge
from flowalign.reward_training.labels import Part, Preferences
from flowalign.reward_training.losses import LabelKind, label_pairs
from flowalign.reward_training.training_settings import Ridge
from flowalign.types import HeadNetwork


@torch.no_grad()
def first_stage(
    cfg: Ridge,
    rater: Rater,
    features: Features,
    preferences: Preferences,
    targets: Float[Tensor, "B m R"],
    kinds: Sequence[LabelKind],
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
        x, y = _problem(joint, preferences, targets[..., d], kinds[d], "train")
        x_held, y_held = _problem(joint, preferences, targets[..., d], kinds[d], "held_out")
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
