"""Wraps Wan 2.1 text-to-video, and the one-network Wan 2.2 (5B), as a flowalign policy."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from diffusers import WanPipeline, WanTransformer3DModel
from torch import Tensor

from flowalign.types import Cond, Guidance, PositiveInt, Request, prompts_of
from pipelines.base import Precision
from pipelines.folder import setting_of
from pipelines.guidance import with_negatives
from pipelines.schedules import has_whole_times, own_sigmas
from pipelines.streaming import streamed
from pipelines.video import Memory, Video, VideoPolicy, refuse_decode_frames
from pipelines.wan_kinds import check_kind
from pipelines.weights import ATTENTION, Lora

LORA = Lora(target_modules=(*ATTENTION, "add_k_proj", "add_v_proj"))
"""Default adapter: attention, also to a first frame. Source: Flow-GRPO's Wan 2.1 script."""
VIDEO = Video(height=480, width=832, num_frames=81, fps=16.0)
"""Video format that Wan 2.1 was released for."""


class Wan(VideoPolicy):
    """Wraps a `WanPipeline` folder or hub identifier with one network as a text-to-video policy.

    `guidance` above 1 makes the guided velocity the policy, at two evaluations each. Schedule and
    times are those of the folder's scheduler, with its shift or `video.shift`: UniPC starts just
    below 1, and its times are whole, floor(1000 sigma), of which a shift of 1 may make one larger
    by 1. Steps are those of transition kernels, not UniPC's, which look back at earlier ones.
    `memory.decode_frames` is exact (`pipelines.streaming`); without it decoding holds two videos.
    """

    pipeline_class: Any = WanPipeline
    transformer_class = WanTransformer3DModel
    num_networks = 1

    def __init__(
        self,
        path: str,
        video: Video = VIDEO,
        guidance: Guidance = 5.0,
        lora: Lora | None = LORA,
        precision: Precision = "bf16",
        max_sequence_length: PositiveInt = 512,
        memory: Memory = Memory(),  # noqa: B008 (frozen)
    ):
        super().__init__(path, video, guidance, lora, precision, max_sequence_length, memory)
        if memory.tile:
            refuse_decode_frames(memory, "with memory.tile Wan decodes all frames of a tile")

    def shape_of_latents(
        self, transformer: Mapping[str, Any], vae: Mapping[str, Any]
    ) -> tuple[int, ...]:
        channels = vae["z_dim"] + self.condition_channels(vae)
        check_kind(self, transformer, channels)
        return super().shape_of_latents(transformer, vae)

    def condition_channels(self, vae: Mapping[str, Any]) -> int:  # noqa: ARG002 (WanI2V uses it)
        """Return the number of input channels that the network gets beside those of the latents."""
        return 0

    def latent_unit(self, vae: Mapping[str, Any]) -> tuple[int, int, int]:
        return vae["z_dim"], vae["scale_factor_temporal"], vae["scale_factor_spatial"]

    def patch(self, transformer: Mapping[str, Any]) -> tuple[int, int, int]:
        return tuple(transformer["patch_size"])

    def statistics(self, vae: Any) -> tuple[Tensor, Tensor]:
        return torch.tensor(vae.config.latents_mean), torch.tensor(vae.config.latents_std)

    def sigmas(self, scheduler: Any, num_steps: int) -> Tensor:
        return own_sigmas(scheduler, num_steps, self.path)

    def load(self, device: torch.device) -> None:
        super().load(device)
        self.whole_times = has_whole_times(self.pipe.scheduler)
        self.time_per_token = bool(setting_of(self.pipeline_class, self.path, "expand_timesteps"))

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Cond:
        with self.text_encoders():
            text, text_neg = self.pipe.encode_prompt(
                prompts_of(requests),
                do_classifier_free_guidance=self.guidance > 1,
                device=self.denoiser.device,
                max_sequence_length=self.max_sequence_length,
            )
        return with_negatives({"text": text}, {"text": text_neg}, self.guidance > 1)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        time = self.times(x, sigma)
        v = self.answer(x, time, cond, "text")
        if self.guidance <= 1:
            return v
        v_neg = self.answer(x, time, cond, "text_neg")
        return v_neg + self.guidance_at(time) * (v - v_neg)

    def answer(self, x: Tensor, time: Tensor, cond: Cond, text: str) -> Tensor:
        """Evaluate the network on x with the text entry `text` of `cond`."""
        return self.call_denoiser(x, timestep=time, encoder_hidden_states=cond[text])

    def guidance_at(self, time: Tensor) -> float | Tensor:  # noqa: ARG002 (Wan 2.2 uses it)
        """Return the guidance scale at these timesteps, one for all rows or one per row."""
        return self.guidance

    def times(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Return the network's timestep input: [n], or [n, tokens] with one per token."""
        time = 1000 * sigma.expand(len(x))
        time = time.long() if self.whole_times else time
        if not self.time_per_token:
            return time
        tokens = self.num_tokens(tuple(x.shape[1:]), self.pipe.components[self.part].config)
        return time.to(x.dtype)[:, None].expand(-1, tokens)

    def pieces(self, z: Tensor) -> Iterator[Tensor]:
        together = self.memory.decode_frames
        return super().pieces(z) if together is None else streamed(self.pipe.vae, z, together)
