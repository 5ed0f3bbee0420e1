"""Defines the network of HyperAlign: it writes low-rank weights of another network's layers."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn


class LowRank(NamedTuple):
    """Holds the factors of a layer's weight update for each sample: up @ down."""

    down: Float[Tensor, "n r d_in"]
    up: Float[Tensor, "n d_out r"]


class HyperLinear(nn.Module):
    """Wraps a linear layer, to which each sample adds weights of its own while they are set."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.linear = linear
        self.written: LowRank | None = None

    def forward(self, x: Float[Tensor, "m tokens d_in"]) -> Float[Tensor, "m tokens d_out"]:
        """Return (W + up @ down) x; rows that hold the samples several times share weights."""
        y = self.linear(x)
        if self.written is None:
            return y
        times = len(x) // len(self.written.down)
        down, up = (factor.repeat(times, 1, 1) for factor in self.written)
        return y + (x.float() @ down.mT @ up.mT).to(y.dtype)


class Hypernetwork(nn.Module):
    """Reads prompt, noise level and, if it is given one, the state; writes weights of all layers.

    The state is read by a strided convolution. Each layer has a learned query, and a transformer
    decoder lets it attend to what was read. Linear maps that layers of one size share turn its
    answer into both factors. `up` starts at 0, so the network begins as it was.
    """

    def __init__(
        self,
        layers: Sequence[tuple[int, int]],
        prompt: int,
        state: tuple[int, int, int] | None,
        rank: int,
        width: int,
        blocks: int,
    ):
        super().__init__()
        self.sizes, self.rank, self.width = tuple(layers), rank, width
        self.prompt, self.time = nn.Linear(prompt, width), nn.Linear(width, width)
        self.state: nn.Conv2d | None = None
        if state is not None:
            channels, height, across = state
            self.state = nn.Conv2d(channels, width, kernel_size=2, stride=2)
            places = (height // 2) * (across // 2)
            self.places = nn.Parameter(torch.randn(places, width) / math.sqrt(width))
        self.queries = nn.Parameter(torch.randn(len(self.sizes), width))
        block = nn.TransformerDecoderLayer(
            width, nhead=4, dim_feedforward=2 * width, dropout=0.0, batch_first=True
        )
        self.decoder = nn.TransformerDecoder(block, blocks)
        inputs, outputs = (sorted({size[side] for size in self.sizes}) for side in (0, 1))
        self.down = nn.ModuleDict({str(d): nn.Linear(width, rank * d) for d in inputs})
        self.up = nn.ModuleDict({str(d): nn.Linear(width, rank * d) for d in outputs})
        for d in inputs:
            nn.init.normal_(self.down[str(d)].weight, std=1 / math.sqrt(width * d))
        for d in outputs:
            nn.init.zeros_(self.up[str(d)].weight)
            nn.init.zeros_(self.up[str(d)].bias)

    def forward(
        self, x: Float[Tensor, "n C H W"], sigma: Float[Tensor, "n"], prompt: Float[Tensor, "n d"]
    ) -> list[LowRank]:
        """Return the weights of each layer, in the order of `layers`."""
        read = [self.prompt(prompt)[:, None], self.time(waves(sigma, self.width))[:, None]]
        if self.state is not None:
            read.append(self.state(x).flatten(2).mT + self.places)
        queries = self.queries.expand(len(x), -1, -1)
        answers = self.decoder(queries, torch.cat(read, 1))
        written = []
        for answer, (d_in, d_out) in zip(answers.unbind(1), self.sizes, strict=True):
            down = self.down[str(d_in)](answer).unflatten(1, (self.rank, d_in))
            written.append(LowRank(down, self.up[str(d_out)](answer).unflatten(1, (d_out, -1))))
        return written


def waves(sigma: Float[Tensor, "n"], width: int) -> Float[Tensor, "n w"]:
    """Return sines and cosines of the noise level at width / 2 frequencies from 1 to 1000."""
    frequencies = torch.logspace(0, 3, width // 2, device=sigma.device)
    angles = sigma[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], 1)
