"""Start a student from its teachers: the mean of their weights or of their adapter updates."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.training.learner import Learner

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
        raise ValueError(
            "recipe.cold_start is merge, but the policy trains no LoRA: set policy.lora, or take "
            "average"
        )
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
