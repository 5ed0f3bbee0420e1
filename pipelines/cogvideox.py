"""Wraps CogVideoX 1.0 (text to video) as a flowalign policy: v-prediction in flow coordinates."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers import CogVideoXPipeline, CogVideoXTransformer3DModel
from torch import Tensor

from flowalign.functional.diffusion import norm
from flowalign.types import Cond, Guidance, Request, prompts_of
from pipelines.base import Precision
from pipelines.discrete_times import flow_of, trailing_sigmas
from pipelines.guidance import guided, with_negatives
from pipelines.video import Memory, Video, VideoPolicy, allowed_frames, refuse_decode_frames
from pipelines.weights import ATTENTION, Lora

LORA = Lora(target_modules=ATTENTION)
"""Default adapter: on the attention of every block."""
WORDS = 226
"""Length of prompts in tokens of the published models; the folder's network replaces it."""


class CogVideoX(VideoPolicy):
    """Wraps a `CogVideoXPipeline` folder or hub identifier as a text-to-video policy.

    It is a diffusion model in flow coordinates, see `pipelines.unet.UNetPolicy`: an Euler step is
    its deterministic DDIM step, and times are evenly spaced from the last one, which here is pure
    noise. `guidance` above 1 makes the guided velocity the policy, at two evaluations each; it is
    constant over time, which is the pipeline's default. The network fixes the length of prompts.

    Its autoencoder takes 1 + 8 k frames and always decodes two latent frames at a time, which is
    exact, so `memory.decode_frames` is refused. CogVideoX 1.5 generates latent frames that its
    pipeline throws away (`patch_size_t`); it is refused, too.
    """

    pipeline_class = CogVideoXPipeline
    transformer_class = CogVideoXTransformer3DModel
    joint_text = True

    def __init__(
        self,
        path: str,
        video: Video,
        guidance: Guidance = 6.0,
        lora: Lora | None = LORA,
        precision: Precision = "bf16",
        memory: Memory = Memory(),  # noqa: B008 (frozen)
    ):
        super().__init__(path, video, guidance, lora, precision, WORDS, memory)
        reason = "CogVideoX decodes two latent frames at a time and can do nothing else"
        refuse_decode_frames(memory, f"{reason}: leave it out")

    def latent_unit(self, vae: Mapping[str, Any]) -> tuple[int, int, int]:
        pixels = 2 ** (len(vae["block_out_channels"]) - 1)
        return vae["latent_channels"], vae["temporal_compression_ratio"], pixels

    def patch(self, transformer: Mapping[str, Any]) -> tuple[int, int, int]:
        return 1, transformer["patch_size"], transformer["patch_size"]

    def statistics(self, vae: Any) -> tuple[Tensor, Tensor]:
        return torch.zeros(1), torch.tensor([1 / vae.config.scaling_factor])

    def shape_of_latents(
        self, transformer: Mapping[str, Any], vae: Mapping[str, Any]
    ) -> tuple[int, ...]:
        if (size := transformer.get("patch_size_t")) is not None:
            raise ValueError(
                f"patch_size_t of {self.path} is {size}: that is CogVideoX 1.5; only 1.0 is "
                "supported, where it is null"
            )
        allowed_frames(self.video.num_frames, 2 * vae["temporal_compression_ratio"], self.path)
        self.max_sequence_length = transformer["max_text_seq_length"]
        return super().shape_of_latents(transformer, vae)

    def sigmas(self, scheduler: Any, num_steps: int) -> Tensor:
        return trailing_sigmas(scheduler, num_steps)

    def noise(self, num_samples: int, generator: torch.Generator) -> Tensor:
        return norm(self.schedule(1)[0]) * super().noise(num_samples, generator)

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Cond:
        with self.text_encoders():
            text, text_neg = self.pipe.encode_prompt(
                prompts_of(requests),
                None,
                self.guidance > 1,
                max_sequence_length=self.max_sequence_length,
                device=self.denoiser.device,
            )
        return with_negatives({"text": text}, {"text": text_neg}, self.guidance > 1)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        return guided(self._unguided, x, sigma.expand(len(x)), cond, self.guidance)

    def _unguided(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        def predict(state: Tensor, time: Tensor) -> Tensor:
            return self.call_denoiser(
                state.transpose(1, 2),
                timestep=time,
                encoder_hidden_states=cond["text"],
                image_rotary_emb=self._positions(x),
            ).transpose(1, 2)

        return flow_of(self.pipe.scheduler, predict, x, sigma)

    def _positions(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Compute the rotary embeddings of the tokens; None for networks without (only 5B has)."""
        if not self.pipe.transformer.config.use_rotary_positional_embeddings:
            return None
        return self.pipe._prepare_rotary_positional_embeddings(
            self.height, self.width, x.shape[2], x.device
        )
