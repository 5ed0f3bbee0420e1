"""Wraps CogVideoX 1.0 (text to video) as a flowalign policy: v-prediction in flow coordinates."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers import CogVideoXPipeline, CogVideoXTransformer3DModel
from torch import Tensor

from flowalign.functional.diffusion import (
    even_times,
    flow_sigmas,
    flow_velocity,
    fractional_time,
    norm,
    preserving_state,
)
from flowalign.types import Cond, Guidance, Request, prompts_of
from pipelines.base import Precision
from pipelines.video import Memory, Video, VideoPolicy, allowed_frames
from pipelines.weights import Lora

LORA = Lora(target_modules=("to_q", "to_k", "to_v", "to_out.0"))
"""Default adapter: on the attention of every block.

A run file that gives some fields of `lora` gets the others from `Lora`, not from here.
"""


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
    max_sequence_length = 226
    """Length of prompts in tokens of the published models; the folder's network replaces it."""

    def __init__(
        self,
        path: str,
        video: Video,
        guidance: Guidance = 6.0,
        lora: Lora | None = LORA,
        precision: Precision = "bf16",
        memory: Memory = Memory(),  # noqa: B008 (frozen)
    ):
        super().__init__(path, video, lora, precision, memory)
        if memory.decode_frames is not None:
            raise ValueError(
                f"memory.decode_frames is {memory.decode_frames}; CogVideoX decodes two latent "
                "frames at a time and can do nothing else: leave it out"
            )
        self.guidance = guidance
        self.evaluations_per_velocity = 2 if guidance > 1 else 1

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
        table = _table(scheduler)
        return torch.cat([table[even_times(num_steps, len(table))], table.new_zeros(1)])

    def noise(self, num_samples: int, generator: torch.Generator) -> Tensor:
        return norm(self.schedule(1)[0]) * super().noise(num_samples, generator)

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Cond:
        guided = self.guidance > 1
        with self.text_encoders():
            text, text_neg = self.pipe.encode_prompt(
                prompts_of(requests),
                None,
                guided,
                max_sequence_length=self.max_sequence_length,
                device=self.denoiser.device,
            )
        return {"text": text, "text_neg": text_neg} if guided else {"text": text}

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        sigma = sigma.expand(len(x))
        if self.guidance <= 1:
            return self._unguided(x, sigma, cond["text"])
        text = torch.cat([cond["text_neg"], cond["text"]])
        v_neg, v = self._unguided(torch.cat([x, x]), sigma.repeat(2), text).chunk(2)
        return v_neg + self.guidance * (v - v_neg)

    def _unguided(self, x: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
        scheduler = self.pipe.scheduler
        prediction = self.call_denoiser(
            preserving_state(x, sigma).transpose(1, 2),
            timestep=fractional_time(sigma, _table(scheduler).to(x.device)),
            encoder_hidden_states=text,
            image_rotary_emb=self._positions(x),
        ).transpose(1, 2)
        return flow_velocity(scheduler.config.prediction_type, prediction, x, sigma)

    def _positions(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Compute the rotary embeddings of the tokens; None for networks without (only 5B has)."""
        if not self.pipe.transformer.config.use_rotary_positional_embeddings:
            return None
        return self.pipe._prepare_rotary_positional_embeddings(
            self.height, self.width, x.shape[2], x.device
        )


def _table(scheduler: Any) -> Tensor:
    """Return the flow sigmas of the model's discrete times, computed in the scheduler's float64."""
    return flow_sigmas(scheduler.alphas_cumprod).float()
