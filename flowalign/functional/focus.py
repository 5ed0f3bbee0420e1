"""Weight the patches of an image by their match to a reference subject and by its detail.

Source: FocusDPO, arXiv:2509.01181; a reconstruction from the abstract. According to the abstract,
focus regions come from the correspondence to the reference and from its complexity, and change with
the noise level. Information-rich patches weigh more, uncertain patches less. The formulas are our
choice.
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
    """Return each patch's cosine to its most similar reference patch, and the index of that patch.

    Negative cosines become 0, because the reference has no similar patch.
    """
    cosine = normalize(features, dim=1) @ normalize(reference, dim=1).T
    best, which = cosine.max(1)
    return best.clamp(0, 1), which


def complexity(patches: Float[Tensor, "q 3 h w"]) -> Float[Tensor, "q"]:
    """Return the pixel standard deviation of each patch, divided by the largest of all patches.

    A reference of one colour has complexity 0 everywhere.
    """
    spread = patches.flatten(2).std(2, correction=0).mean(1)
    return spread / spread.max().clamp(min=1e-6)


def focus(
    match: Float[Tensor, "p"], which: Int[Tensor, "p"], detail: Float[Tensor, "q"]
) -> Float[Tensor, "p"]:
    """Return match * (1 + detail) / 2, largest for close matches of detailed reference patches."""
    return match * (1 + detail[which]) / 2


def focus_weights(
    field: Float[Tensor, "n *mask"], sigma: Float[Tensor, "n"], floor: float, window: int
) -> Float[Tensor, "n *mask"]:
    """Return the weights of positions at a noise level, with mean 1 per row.

    The weights are floor + (1 - floor) f, then normalised. Here f = (1 - sigma) field + sigma m,
    and m is the mean of the field over windows of `window` positions, because only the layout is
    visible at pure noise. Positions without the subject have weight `floor` before normalisation.
    """
    pictures = field.flatten(0, -3)[:, None]
    coarse = avg_pool2d(pictures, window, 1, window // 2, count_include_pad=False)
    coarse = coarse.reshape(field.shape)
    noise = per_row(sigma, field)
    return normalise_mean(floor + (1 - floor) * torch.lerp(field, coarse, noise))
