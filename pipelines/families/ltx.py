"""Wraps LTX-Video as flowalign policies: text to video, and image to video."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flowalign.types import Cond, Guidance, PositiveInt, Request, prompts_of
from pipelines.families.first_frame import FixedFirstFrame
from pipelines.network.weights import ATTENTION, Lora, Precision
from pipelines.parts.encoding import decode_windows
from pipelines.parts.evaluation import guide, with_negatives
from pipelines.parts.folder import Config
from pipelines.video import Memory, Video, VideoCodec, VideoPolicy

LORA = Lora(target_modules=ATTENTION)
"""Default adapter: on self- and cross-attention of every block."""
DECODE_TIME, DECODE_NOISE = 0.05, 0.025
"""Timestep and noise share of decoders that do the last denoising step. Source: diffusers' guide,
from 0.9.1."""


class LTXCodec(VideoCodec):
    """Encodes clips with statistics of each channel, and decodes them in windows of frames."""

    def channel_statistics(self) -> tuple[Tensor, Tensor]:
        return self.vae.latents_mean, self.vae.latents_std / self.vae.config.scaling_factor

    def pieces(self, z: Tensor) -> Iterator[Tensor]:
        vae, time = self.vae, None
        if vae.config.timestep_conditioning:
            one = torch.Generator().manual_seed(0)
            noise = torch.randn(z.shape[1:], generator=one, dtype=torch.float32)
            z = (1 - DECODE_NOISE) * z + DECODE_NOISE * noise.to(z)
            time = z.new_full((len(z),), DECODE_TIME)
        size, unit = self.memory.decode_frames or z.shape[2], vae.temporal_compression_ratio
        return decode_windows(
            lambda part: vae.decode(part, time, return_dict=False)[0], z, size, unit
        )


class LTXPolicy(VideoPolicy):
    """Wraps a pipeline with the video autoencoder and the schedule of LTX-Video."""

    default_lora = LORA
    shifts_by_size = True

    def shape_of_latents(self, transformer: Config, vae: Config) -> tuple[int, ...]:
        halved = 2 ** sum(vae["spatio_temporal_scaling"])
        frames = vae.get("temporal_compression_ratio") or vae["patch_size_t"] * halved
        pixels = vae.get("spatial_compression_ratio") or vae["patch_size"] * halved
        return self.shape_of_clip(vae["latent_channels"], frames, pixels, transformer)


class LTX(LTXPolicy):
    """Wraps an `LTXPipeline` folder or hub identifier as a text-to-video policy.

    `guidance` above 1 makes the guided velocity the policy, at two evaluations each. It is not
    rescaled, as in the pipeline's default. The frame rate is an input of the network. A decoder
    conditioned on a timestep (0.9.1 and later) adds noise; each sample always gets the same noise.

    With `memory.decode_frames` the clip is decoded in windows of this many latent frames plus one,
    and overlapping windows are blended. Without it the clip is decoded at once, as in the pipeline.
    """

    pipeline_class = "LTXPipeline"
    transformer_class = "LTXVideoTransformer3DModel"
    unit_noise = True

    def __init__(
        self,
        path: str,
        video: Video,
        guidance: Guidance = 3.0,
        lora: Lora | None = LORA,
        precision: Precision = "bf16",
        max_sequence_length: PositiveInt = 128,
        memory: Memory = Memory(),  # noqa: B008 (frozen)
    ):
        codec = LTXCodec(video, memory)
        super().__init__(path, codec, lora, precision, guidance, max_sequence_length)

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Cond:
        with self.text_encoder.on_device():
            text, mask, text_neg, mask_neg = self.pipe.encode_prompt(
                prompts_of(requests),
                None,
                self.guidance > 1,
                max_sequence_length=self.max_sequence_length,
                device=self.denoiser.device,
            )
        negative = {"text": text_neg, "mask": mask_neg}
        return with_negatives({"text": text, "mask": mask}, negative, self.guidance > 1)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        return guide(self._unguided, x, self.times(x, sigma), cond, self.guidance)

    def _unguided(self, x: Tensor, time: Tensor, cond: Cond) -> Tensor:
        frames, height, width = self.grid
        seconds = self.pipe.vae_temporal_compression_ratio / self.video.fps
        pixels = self.pipe.vae_spatial_compression_ratio
        v = self.call_denoiser(
            x.flatten(2).mT,
            timestep=time,
            encoder_hidden_states=cond["text"],
            encoder_attention_mask=cond["mask"],
            num_frames=frames,
            height=height,
            width=width,
            rope_interpolation_scale=(seconds, pixels, pixels),
        )
        return v.mT.unflatten(2, self.grid)


class LTXI2V(FixedFirstFrame, LTX):
    """Wraps an `LTXImageToVideoPipeline` folder or hub identifier as an image-to-video policy.

    The single reference of a request is the first frame. It replaces the first latent frame, at
    time 0, see `first_frame`. The pipeline samples its latents from the encoder's distribution;
    this policy uses the mode. In all other respects the class equals `LTX`.
    """

    pipeline_class = "LTXImageToVideoPipeline"
