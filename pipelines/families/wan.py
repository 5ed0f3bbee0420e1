"""Wraps Wan 2.1 text-to-video, and the one-network Wan 2.2 (5B), as a flowalign policy."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowalign.types import Cond, Guidance, ModelPlan, PositiveInt, Request, prompts_of
from pipelines.families.first_frame import check_text_length, encode_conditions
from pipelines.families.wan_experts import Experts, join_experts, plan_experts
from pipelines.families.wan_kinds import check_kind
from pipelines.network.schedules import has_whole_times, scheduler_sigmas
from pipelines.network.weights import ATTENTION, Lora
from pipelines.parts.folder import Config
from pipelines.parts.guidance import with_negatives
from pipelines.parts.streaming import stream_frames
from pipelines.policy import DiffusersPolicy, Precision
from pipelines.video import (
    Memory,
    Video,
    VideoCodec,
    count_patches,
    refuse_decode_frames,
    shape_of_clip,
)

LORA = Lora(target_modules=(*ATTENTION, "add_k_proj", "add_v_proj"))
"""Default adapter: attention, including attention to a first frame. Source: Flow-GRPO's Wan 2.1
script."""
VIDEO = Video(height=480, width=832, num_frames=81, fps=16.0)
"""Default video format, for which Wan 2.1 was released."""


class WanCodec(VideoCodec):
    """Encodes clips with statistics of each channel, and decodes them in exact chunks."""

    def statistics(self) -> tuple[Tensor, Tensor]:
        config = self.vae.config
        values = [config.latents_mean, config.latents_std]
        mean, std = torch.tensor(values, dtype=torch.float32)
        return mean, std

    def pieces(self, z: Tensor) -> Iterator[Tensor]:
        together = self.memory.decode_frames
        return super().pieces(z) if together is None else stream_frames(self.vae, z, together)


class Wan(DiffusersPolicy):
    """Wraps a `WanPipeline` folder or hub identifier with one network as a text-to-video policy.

    `guidance` above 1 makes the guided velocity the policy, at two evaluations each. Schedule and
    timesteps come from the folder's scheduler, with its shift or with `video.shift`. UniPC starts
    just below sigma 1. Its timesteps are integers, floor(1000 sigma); with a shift of 1 one of
    them can be larger by 1. Steps follow the transition kernel, not UniPC's multistep update.
    `memory.decode_frames` is exact (`parts.streaming`); without it decoding holds two videos.
    """

    pipeline_class = "WanPipeline"
    transformer_class = "WanTransformer3DModel"
    default_lora = LORA
    unit_noise = True
    experts: Experts | None = None
    """Division of noise levels between two networks; None if there is one network."""
    sees_first_frame: bool = False
    """Whether the network receives the first frame of a request in separate channels."""

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
        super().__init__(
            *(path, WanCodec(video, memory), lora, precision, guidance, max_sequence_length),
            *(memory.gradient_checkpointing, memory.offload_text),
        )
        self.video = video
        if memory.tile:
            refuse_decode_frames(memory, "with memory.tile Wan decodes all frames of a tile")

    def divide(self, experts: Experts) -> None:
        """Divide the noise levels between two networks."""
        self.experts, self.network.trained = experts, experts.trained
        self.network.assemble = partial(join_experts, self.folder, experts)

    def plan(self) -> ModelPlan:
        plan = super().plan()
        return plan_experts(self.experts, plan) if self.experts else plan

    def shape_of_latents(self, transformer: Config, vae: Config) -> tuple[int, ...]:
        channels, frames = vae["z_dim"], vae["scale_factor_temporal"]
        if self.sees_first_frame:
            check_text_length(self, transformer)
            channels += frames + vae["z_dim"]  # mask and latents of the frame
        check_kind(self, transformer, channels)
        unit = vae["z_dim"], frames, vae["scale_factor_spatial"]
        return shape_of_clip(self, unit, transformer["patch_size"])

    def num_tokens(self, latent_shape: tuple[int, ...], transformer: Config) -> int:
        return count_patches(latent_shape, transformer["patch_size"])

    def sigmas(self, scheduler: Any, num_steps: int) -> Tensor:
        return scheduler_sigmas(scheduler, num_steps, self.path)

    def load(self, device: torch.device) -> None:
        super().load(device)
        self.whole_times = has_whole_times(self.pipe.scheduler)
        self.time_per_token = bool(self.folder.setting("expand_timesteps"))

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Cond:
        with self.text_encoder.on_device():
            text, text_neg = self.pipe.encode_prompt(
                prompts_of(requests),
                do_classifier_free_guidance=self.guidance > 1,
                device=self.denoiser.device,
                max_sequence_length=self.max_sequence_length,
            )
        cond = with_negatives({"text": text}, {"text": text_neg}, self.guidance > 1)
        return (
            cond | encode_conditions(self, requests, text.dtype) if self.sees_first_frame else cond
        )

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        time = self.times(x, sigma)
        v = self.evaluate(x, time, cond, "text")
        if self.guidance <= 1:
            return v
        v_neg = self.evaluate(x, time, cond, "text_neg")
        return v_neg + self._guidance_at(time) * (v - v_neg)

    def times(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Return the network's timestep input: [n], or [n, tokens] with one per token."""
        time = 1000 * sigma.expand(len(x))
        time = time.long() if self.whole_times else time
        if not self.time_per_token:
            return time
        tokens = self.num_tokens(tuple(x.shape[1:]), self.pipe.components["transformer"].config)
        return time.to(x.dtype)[:, None].expand(-1, tokens)

    def evaluate(self, x: Tensor, time: Tensor, cond: Cond, text: str) -> Tensor:
        """Evaluate the network on x with the text entry `text` of `cond`."""
        frame = {"encoder_hidden_states_image": cond["clip"]} if "clip" in cond else {}
        x = torch.cat([x, cond["image"]], 1) if self.sees_first_frame else x
        return self.call_denoiser(x, timestep=time, encoder_hidden_states=cond[text], **frame)

    def _guidance_at(self, time: Tensor) -> float | Tensor:
        """Return the guidance scale at these timesteps, one for all rows or one per row."""
        if self.experts is None or self.experts.guidance_2 is None:
            return self.guidance
        high = (time >= self.denoiser.boundary)[:, None, None, None, None]
        return torch.where(high, self.guidance, self.experts.guidance_2)
