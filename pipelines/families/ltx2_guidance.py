"""Divides the state of LTX-2, one flat vector, into its video and its sound, and guides both.

The evaluations are combined into guided velocities of the two streams. The gradient that the audio
stream gets from the video stream is scaled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from flowalign.functional.path_gradient import scale_gradient
from flowalign.types import Guidance, NonNegativeInt, UnitInterval

_UNIT = 4
"""Spectrogram frames, and frequencies, per latent; a constant of diffusers' audio autoencoder."""


@dataclass(frozen=True)
class Parts:
    """Shapes of the two parts of a state: the video's latents, then the audio's."""

    video: tuple[int, ...]
    """Shape (C, F, H, W)."""
    audio: tuple[int, int, int]
    """Shape (C, L, M): L latents along time, M along frequency."""

    @property
    def size(self) -> int:
        """Return the number of values of a state."""
        return sum(self.sizes.values())

    @property
    def sizes(self) -> dict[str, int]:
        """Return the number of values of each part."""
        return {"video": prod(self.video), "audio": prod(self.audio)}

    def noise(self, num_samples: int, generator: torch.Generator) -> Float[Tensor, "n d"]:
        """Draw the video's noise and then the audio's, in the order of the pipeline."""
        shapes = self.video, self.audio
        drawn = (
            torch.randn(num_samples, *s, generator=generator, dtype=torch.float32) for s in shapes
        )
        return self.joined(*drawn)

    def split(
        self, x: Float[Tensor, "n d"]
    ) -> tuple[Float[Tensor, "n C f h w"], Float[Tensor, "n c l m"]]:
        """Return the latents of video and audio."""
        video, audio = x.split([*self.sizes.values()], 1)
        return video.unflatten(1, self.video), audio.unflatten(1, self.audio)

    def joined(
        self, video: Float[Tensor, "n C f h w"], audio: Float[Tensor, "n c l m"]
    ) -> Float[Tensor, "n d"]:
        """Return the state that holds these latents of video and audio."""
        return torch.cat([video.flatten(1), audio.flatten(1)], 1)

    def audio_of(self, tokens: Float[Tensor, "n l t"]) -> Float[Tensor, "n c l m"]:
        """Return the audio latents of tokens, given one token per latent along time."""
        return tokens.unflatten(2, (-1, self.audio[2])).transpose(1, 2)


def audio_tokens(audio: Float[Tensor, "n c l m"]) -> Float[Tensor, "n l t"]:
    """Return audio latents as tokens, the layout of the network and of the statistics."""
    return audio.transpose(1, 2).flatten(2)


def audio_shape(config: Mapping[str, Any], seconds: float) -> tuple[int, int, int]:
    """Return the shape of audio latents for this duration, given the autoencoder's config."""
    rate = config["sample_rate"] / config["mel_hop_length"] / _UNIT
    return config["latent_channels"], round(seconds * rate), config["mel_bins"] // _UNIT


def waveform(pipe: Any, audio: Float[Tensor, "n c l m"], parts: Parts) -> Float[Tensor, "n s k"]:
    """Decode audio latents to sound at the rate of the pipeline's vocoder."""
    vae = pipe.audio_vae
    tokens = audio_tokens(audio) * vae.latents_std + vae.latents_mean
    spectrogram = vae.decode(parts.audio_of(tokens).to(vae.dtype), return_dict=False)[0]
    return pipe.vocoder(spectrogram).float()


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
