"""Rates noisy latents by a convolutional head on the output of a shortened denoiser (DRM).

The policy's denoiser runs without its last blocks. Its own output layers turn the tokens of the
last remaining block into a map of the latent's shape, which the head reads at every noise level.

Source: DRM, arXiv:2605.25661, and code of jjaxonx/DRM, which removes 3 of the 24 blocks of SD3.5
Medium and also trains the blocks; here only the head is trained.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from math import isqrt
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from flowalign.functional.rating import Features, Ratings
from flowalign.types import Cond, Decay, Head, HeadNetwork, Policy, PositiveInt
from flowalign.utils.adapters import adapters_off
from reward_models.backbones.first_blocks import BlockFeatures, FirstBlocks


class DenoiserMap(FirstBlocks):
    """Reads the map that a policy's output layers predict from its first `blocks` blocks.

    Guidance is off. `at_once` limits the number of latents per call. Denoisers with a second stack
    of blocks, such as FLUX.1, are refused.
    """

    def __init__(self, policy: Policy, blocks: PositiveInt, at_once: PositiveInt = 64):
        super().__init__(policy, blocks, None, at_once)

    @classmethod
    @override
    def reader(cls, policy: Policy, settings: Mapping[str, Any]) -> BlockFeatures:
        return OutputMap(policy, settings["blocks"], None)


class OutputMap(BlockFeatures):
    """Evaluation of a shortened denoiser with its released weights."""

    reads_output = True

    def __init__(self, policy: Policy, blocks: int, regions: Sequence[int] | None):
        super().__init__(policy, blocks, regions)
        if hasattr(policy.denoiser, "single_transformer_blocks"):
            raise ValueError(
                f"DenoiserMap needs a denoiser with one stack of blocks, but "
                f"{type(policy.denoiser).__name__} has two: choose FirstBlocks"
            )

    @override
    def __call__(
        self, x: Float[Tensor, "n *latent"], sigma: Float[Tensor, "*n"], cond: Cond
    ) -> Features:
        with adapters_off(self.policy.denoiser), shorten(self.stacks, self.blocks):
            found = self.policy.velocity(x, sigma, cond).float().flatten(1)
        return Features(found, found.new_zeros(len(found), 0))


@contextmanager
def shorten(stacks: Sequence[nn.ModuleList], blocks: int) -> Iterator[None]:
    """Remove all but the first blocks of each stack within the context."""
    removed = [list(stack)[blocks:] for stack in stacks]
    try:
        for stack in stacks:
            del stack[blocks:]
        yield
    finally:
        for stack, rest in zip(stacks, removed, strict=True):
            stack.extend(rest)


class ConvHead(Head):
    """Convolutions of stride 2 with group normalisation, an average over places, and two layers.

    The joint features must be maps [channels, height, width] of square images. The defaults are
    the published sizes.
    """

    def __init__(
        self,
        channels: PositiveInt = 16,
        widths: Sequence[PositiveInt] = (256, 512, 512),
        groups: PositiveInt = 32,
        dropout: Decay = 0.1,
    ):
        if not widths or any(width % groups for width in widths):
            raise ValueError(
                f"widths are {list(widths)} and groups {groups}: give at least one width, each a "
                "multiple of groups"
            )
        self.channels, self.widths, self.groups, self.dropout = channels, widths, groups, dropout

    @override
    def build(self, joint: int, prompt: int, dims: Sequence[str]) -> HeadNetwork:
        """Build the network; raise ValueError if the features are no square maps."""
        side = isqrt(joint // self.channels)
        if self.channels * side**2 != joint:
            raise ValueError(
                f"ConvHead reads square maps of {self.channels} channels, but features have "
                f"{joint} numbers: set channels to that of the latents, or use another head"
            )
        return _Convolutions(self, side, len(dims))


class _Convolutions(HeadNetwork):
    def __init__(self, head: ConvHead, side: int, num_dims: int):
        super().__init__()
        self.shape, last = (head.channels, side, side), head.widths[-1]
        layers: list[nn.Module] = []
        for size, width in pairwise((head.channels, *head.widths)):
            norm = nn.GroupNorm(head.groups, width)
            layers += [nn.Conv2d(size, width, 3, stride=2, padding=1), norm, nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.score = nn.Sequential(
            nn.Linear(last, last), nn.ReLU(), nn.Dropout(head.dropout), nn.Linear(last, num_dims)
        )

    @override
    def linear_layer(self) -> None:
        return None

    def forward(self, features: Features) -> Ratings:
        maps = self.body(features.joint.unflatten(1, self.shape))
        return Ratings(self.score(maps.mean((2, 3))))
