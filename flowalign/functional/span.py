"""Treat consecutive denoising steps as one: ratios of chunks, and the steps of spans.

A chunk is clipped and credited as one step. Source: GCPO, arXiv:2510.21583, and code of
xingzhejun/GCPO. The gradient of a span flows through all of its steps. Source: CogniEdit,
arXiv:2512.13276v1.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor


def chunk_log_ratio(
    log_ratio: Float[Tensor, "n"], others: Float[Tensor, "n"], size: Int[Tensor, "n"]
) -> Float[Tensor, "n"]:
    """Return the log of the geometric mean of a chunk's ratios, (product of ratios)^(1 / size).

    `others` are the sums of the log-ratios of the other transitions of the chunk, without gradient,
    and `size` its number of transitions. The value is equal for all transitions of a chunk, but
    each gradient reaches only the ratio of its own transition. For any f, the sum of the gradients
    of f(chunk_log_ratio) over a chunk is the gradient of f at the product.
    """
    return (log_ratio + others) / size


def chunks_of_sizes(sizes: Sequence[int], num_steps: int) -> Int[Tensor, "T"]:
    """Return the chunk of each step, for chunks of `sizes`; remaining steps are single chunks."""
    if sum(sizes) > num_steps:
        raise ValueError(
            f"algorithm.chunk_sizes {list(sizes)} cover {sum(sizes)} steps; there are {num_steps}"
        )
    filled = torch.tensor([*sizes, *[1] * (num_steps - sum(sizes))])
    return torch.arange(len(filled)).repeat_interleave(filled)


def latent_change(states: Float[Tensor, "B S *latent"]) -> Float[Tensor, "B S-1"]:
    """Return L1rel of each step, |x_{k+1} - x_k|_1 / |x_k|_1."""
    flat = states.float().flatten(2)
    return flat.diff(dim=1).abs().sum(2) / flat[:, :-1].abs().sum(2)


def chunks_of_change(change: Float[Tensor, "T"]) -> Int[Tensor, "T"]:
    """Return the chunk of each step; a chunk ends where the latent change stops rising or falling.

    The paper chooses boundaries from a plot. Ending a chunk at the turning step is our choice.
    """
    slope = change.diff().sign()
    turned = torch.zeros(len(change), dtype=torch.long)
    turned[2:] = slope[1:] * slope[:-1] < 0
    return turned.cumsum(0)


def find_spans(trained: Sequence[int], longest: int) -> list[list[int]]:
    """Return the spans of at most `longest` consecutive steps in an increasing list of steps.

    If a run does not divide evenly, its last span is shorter.
    """
    spans: list[list[int]] = []
    for k in trained:
        if spans and spans[-1][-1] == k - 1 and len(spans[-1]) < longest:
            spans[-1].append(k)
        else:
            spans.append([k])
    return spans
