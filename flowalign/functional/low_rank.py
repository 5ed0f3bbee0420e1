"""Merge low-rank updates of weights."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


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
