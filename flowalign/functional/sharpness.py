"""Measure the sharpness of images.

Source: Pech-Pacheco et al., "Diatom autofocusing in brightfield microscopy", ICPR 2000.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import conv2d, pad

LUMA = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in brightness (ITU-R BT.601)."""
_LAPLACIAN = ((0.0, 1.0, 0.0), (1.0, -4.0, 1.0), (0.0, 1.0, 0.0))


def variance_of_laplacian(media: Float[Tensor, "n F 3 H W"]) -> Float[Tensor, "n"]:
    """Return the variance over pixels of each frame's Laplacian, averaged over frames.

    The Laplacian is computed on the brightness in [0, 1] with replicated borders. Blur lowers the
    variance and noise raises it. The variance is quadratic in the contrast.
    """
    luma = torch.einsum("nfchw,c->nfhw", media, media.new_tensor(LUMA))
    frames = pad(luma.flatten(0, 1)[:, None], (1, 1, 1, 1), mode="replicate")
    edges = conv2d(frames, media.new_tensor(_LAPLACIAN)[None, None])
    return edges.flatten(1).var(dim=1, correction=0).unflatten(0, media.shape[:2]).mean(dim=1)
