"""Combines the evaluations of LTX-2 into guided velocities of its two streams, video and audio.

Also scales the gradient that the audio stream gets from the video stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from flowalign.functional.path_gradient import scale_gradient
from flowalign.types import Guidance, NonNegativeInt, UnitInterval


@dataclass(frozen=True, kw_only=True)
class BlockGradient:
    """Factor on the gradient from video to audio in a range of blocks."""

    start: UnitInterval
    """Share of the depth at which the range starts: block b of n is inside if start <= b / n."""
    stop: UnitInterval
    """Share of the depth at which the range ends: block b of n is inside if b / n < stop."""
    scale: UnitInterval
    """Factor on the gradient; 0: none."""

    def __post_init__(self) -> None:
        """Reject an empty range."""
        if not self.start < self.stop:
            raise ValueError(
                f"streams.audio_gradient has start {self.start} and stop {self.stop}: need start < "
                "stop"
            )


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Settings of the two streams of LTX-2 except the guidance of the video.

    The defaults of the guidance follow its pipeline.
    """

    audio_guidance: Guidance | None = 7.0
    """Classifier-free guidance scale of the audio; null uses the scale of the video."""
    perturbed: Guidance = 1.0
    """Scale of guidance away from a network without self-attention in `perturbed_blocks`; 0 skips
    this evaluation."""
    perturbed_blocks: tuple[NonNegativeInt, ...] = (28,)
    """Indices of the perturbed blocks."""
    modality: Guidance = 3.0
    """Scale of guidance away from streams that do not attend to each other; 1 skips this
    evaluation."""
    rescale: UnitInterval = 0.7
    """Share (0 to 1) by which the standard deviation of the guided clean estimate is restored to
    that of the conditional estimate."""
    audio_gradient: tuple[BlockGradient, ...] = ()
    """Factors on the gradient that audio gets where video attends to it; other blocks have 1.
    Values do not change. OmniNFT, arXiv:2605.12480: 0 in block 0 of 48, 0.1 in blocks 1 to 10, and
    0.3 in blocks 40 to 47."""

    def weights(self, guidance: float) -> dict[str, tuple[float, float]]:
        """Return the (video, audio) weights of each evaluation in use, keyed by its name.

        `guidance` is the scale of the video. An evaluation is in use if either weight is above 0.
        """
        audio = guidance if self.audio_guidance is None else self.audio_guidance
        found = {
            "negative": (guidance - 1, audio - 1),
            "perturbed": (self.perturbed, self.perturbed),
            "isolated": (self.modality - 1, self.modality - 1),
        }
        return {name: pair for name, pair in found.items() if max(pair) > 0}

    def inputs(self, name: str) -> dict[str, Any]:
        """Return the additional network inputs of the named evaluation."""
        ways = {
            "perturbed": {"spatio_temporal_guidance_blocks": list(self.perturbed_blocks)},
            "isolated": {"isolate_modalities": True},
        }
        return ways.get(name, {})

    def check_blocks(self, depth: int, path: str) -> None:
        """Raise ValueError if the network at `path` lacks one of `perturbed_blocks`."""
        blocks = self.perturbed_blocks
        if self.perturbed > 0 and not all(block < depth for block in blocks or [depth]):
            raise ValueError(
                f"streams.perturbed_blocks is {list(blocks)}; {path} has blocks 0 to "
                f"{depth - 1}: name some of them, or set streams.perturbed to 0"
            )


def scale_audio_gradients(blocks: nn.ModuleList, parts: Sequence[BlockGradient]) -> None:
    """Scale the gradient of the audio that each block's video attends to."""
    for part in parts:
        for b, block in enumerate(blocks):
            if part.start <= b / len(blocks) < part.stop:
                attention = block.get_submodule("audio_to_video_attn")
                attention.register_forward_pre_hook(partial(_scale, part.scale), with_kwargs=True)


def _scale(
    scale: float, _: nn.Module, args: tuple[Any, ...], given: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs of an attention layer with a scaled gradient of its context."""
    context = scale_gradient(given["encoder_hidden_states"], scale)
    return args, {**given, "encoder_hidden_states": context}


def guide_streams(
    states: Sequence[Tensor],
    sigma: Float[Tensor, "n"],
    v: Sequence[Tensor],
    others: Sequence[tuple[tuple[float, float], Sequence[Tensor]]],
    rescale: float,
) -> Float[Tensor, "n d"]:
    """Return the flat velocity of video and audio, each guided by its own weights of `others`."""
    parts = [
        guide(x.flatten(1), sigma, v[k], [(weight[k], u[k]) for weight, u in others], rescale)
        for k, x in enumerate(states)
    ]
    return torch.cat(parts, 1)


def guide(
    x: Float[Tensor, "n d"],
    sigma: Float[Tensor, "n"],
    v: Float[Tensor, "n d"],
    others: Sequence[tuple[float, Float[Tensor, "n d"]]],
    rescale: float,
) -> Float[Tensor, "n d"]:
    """Return v + sum of weight (v - other), rescaled as a clean estimate x0 = x - sigma v.

    x0 of the result is f x0 of the sum, where f = rescale std(x0 of v) / std(x0 of the sum) + 1 -
    rescale, with standard deviations over a sample. Source: diffusers' `LTX2Pipeline`, which adds
    the guidance terms to x0 with the same result.
    """
    summed = v + sum((weight * (v - other) for weight, other in others), 0 * v)
    if rescale == 0:
        return summed
    sigma = sigma[:, None]
    clean = x - sigma * summed
    deviations = [one.std(dim=1, keepdim=True) for one in (x - sigma * v, clean)]
    factor = rescale * deviations[0] / deviations[1] + 1 - rescale
    return summed + (1 - factor) * clean / sigma
