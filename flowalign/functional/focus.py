"""Weigh the places of a picture by how surely they show a given subject, and how much of it.

Source: FocusDPO, arXiv:2509.01181, of which the abstract was read: focus regions come from the
correspondence to the reference and the reference's complexity, and move with the noise level;
information-rich patches count more, uncertain ones less. The formulas here are a reconstruction.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import avg_pool2d, normalize

from flowalign.functional.maps import normalise_mean
from flowalign.functional.transition import per_row


def correspondence(
    features: Float[Tensor, "p D"], reference: Float[Tensor, "q D"]
) -> tuple[Float[Tensor, "p"], Int[Tensor, "p"]]:
    """Return the cosine of each patch to the reference's patch that is most like it, and which.

    Negative cosines are 0: the reference has nothing like it.
    """
    cosine = normalize(features, dim=1) @ normalize(reference, dim=1).T
    best, which = cosine.max(1)
    return best.clamp(0, 1), which


def complexity(patches: Float[Tensor, "q 3 h w"]) -> Float[Tensor, "q"]:
    """Return the standard deviation of the pixels of each patch, divided by the largest of them.

    A reference of one colour has complexity 0 everywhere.
    """
    spread = patches.flatten(2).std(2, correction=0).mean(1)
    return spread / spread.max().clamp(min=1e-6)


def focus(
    match: Float[Tensor, "p"], which: Int[Tensor, "p"], detail: Float[Tensor, "q"]
) -> Float[Tensor, "p"]:
    """Return match * (1 + detail) / 2: sure matches of rich places of the reference count most."""
    return match * (1 + detail[which]) / 2


def focus_weights(
    field: Float[Tensor, "n *mask"], sigma: Float[Tensor, "n"], floor: float, window: int
) -> Float[Tensor, "n *mask"]:
    """Return the weights of places at a noise level: mean 1 in each row.

    They are floor + (1 - floor) f, with f the field near the data, and its mean over windows of
    `window` places at pure noise, where only the layout can be told; in between both are mixed,
    sigma of the mean. Places without the subject keep the floor.
    """
    pictures = field.flatten(0, -3)[:, None]
    coarse = avg_pool2d(pictures, window, 1, window // 2, count_include_pad=False)
    coarse = coarse.reshape(field.shape)
    noise = per_row(sigma, field)
    return normalise_mean(floor + (1 - floor) * torch.lerp(field, coarse, noise))
