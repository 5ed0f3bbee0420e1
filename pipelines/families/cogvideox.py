"""Wraps CogVideoX 1.0 (text to video) as a flowalign policy: v-prediction in flow coordinates."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowalign.types import Cond, Guidance, Request, prompts_of
from pipelines.network.schedules import predict_flow, trailing_sigmas
from pipelines.network.weights import ATTENTION, Lora, Precision
from pipelines.parts.evaluation import guide, with_negatives
from pipelines.parts.folder import Config
from pipelines.video import Memory, Video, VideoCodec, VideoPolicy, check_num_frames

LORA = Lora(target_modules=ATTENTION)
"""Default adapter: on the attention of every block."""
WORDS = 226
"""Prompt length of the published models, in tokens. The value in the folder's network replaces it.
"""


class CogVideoXCodec(VideoCodec):
    """Decodes three latent frames, and then two at a time."""

    traced_frames = 5


class CogVideoX(VideoPolicy):
    """Wraps a `CogVideoXPipeline` folder or hub identifier as a text-to-video policy.

    It is a diffusion model in flow coordinates, see `pipelines.UNetPolicy`. An Euler step equals
    its deterministic DDIM step. Timesteps are evenly spaced from the last one, which is pure noise
    for this model. `guidance` above 1 makes the guided velocity the policy, at two evaluations
    each. The scale is constant over time, as in the pipeline's default. The network fixes the
    length of prompts.

    Its autoencoder takes 1 + 8 k frames and always decodes two latent frames at a time, which is
    exact, so setting `memory.decode_frames` raises ValueError. CogVideoX 1.5 (`patch_size_t`) is
    not supported, because its pipeline generates latent frames and then discards them.
    """

    pipeline_class = "CogVideoXPipeline"
    transformer_class = "CogVideoXTransformer3DModel"
    fixed = dict.fromkeys(["transformer.ofs_embed_dim", "transformer.patch_size_t"])
    default_lora = LORA

    def __init__(
        self,
        path: str,
        video: Video,
        guidance: Guidance = 6.0,
        lora: Lora | None = LORA,
        precision: Precision = "bf16",
        memory: Memory = Memory(),  # noqa: B008 (frozen)
    ):
        codec = CogVideoXCodec(video, memory)
        super().__init__(path, codec, lora, precision, guidance, WORDS)
        codec.refuse_decode_frames(
            "CogVideoX always decodes two latent frames at a time: leave it out"
        )

    def shape_of_latents(self, transformer: Config, vae: Config) -> tuple[int, ...]:
        frames = vae["temporal_compression_ratio"]
        check_num_frames(self.video.num_frames, 2 * frames, self.path)
        self.max_sequence_length = transformer["max_text_seq_length"]
        pixels = 2 ** (len(vae["block_out_channels"]) - 1)
        return self.shape_of_clip(vae["latent_channels"], frames, pixels, transformer)

    def num_tokens(self, latent_shape: tuple[int, ...], transformer: Config) -> int:
        return super().num_tokens(latent_shape, transformer) + self.max_sequence_length

    def sigmas(self, scheduler: Any, num_steps: int) -> Tensor:
        return trailing_sigmas(scheduler, num_steps)

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Cond:
        with self.text_encoder.on_device():
            text, text_neg = self.pipe.encode_prompt(
                prompts_of(requests),
                None,
                self.guidance > 1,
                max_sequence_length=self.max_sequence_length,
                device=self.denoiser.device,
            )
        return with_negatives({"text": text}, {"text": text_neg}, self.guidance > 1)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        return guide(self._unguided, x, sigma.expand(len(x)), cond, self.guidance)

    def _unguided(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        def predict(state: Tensor, time: Tensor) -> Tensor:
            return self.call_denoiser(
                state.transpose(1, 2),
                timestep=time,
                encoder_hidden_states=cond["text"],
                image_rotary_emb=self._positions(x),
            ).transpose(1, 2)

        return predict_flow(self.pipe.scheduler, predict, x, sigma)

    def _positions(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the rotary embeddings of the tokens; None for networks without them (2B)."""
        if not self.pipe.transformer.config.use_rotary_positional_embeddings:
            return None
        return self.pipe._prepare_rotary_positional_embeddings(
            self.height, self.width, x.shape[2], x.device
        )
