"""Wraps Wan 2.1 text-to-video, and the one-network Wan 2.2 (5B), as a flowalign policy."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from diffusers import WanPipeline, WanTransformer3DModel
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, unpatchify
from torch import Tensor

from flowalign.types import Cond, Guidance, PositiveInt, Request, prompts_of
from pipelines.base import Precision
from pipelines.folder import scheduler_of, setting_of
from pipelines.video import Memory, Video, VideoPolicy
from pipelines.weights import Lora

LORA = Lora(
    target_modules=("to_q", "to_k", "to_v", "to_out.0", "add_k_proj", "add_v_proj"),
)
"""Default adapter: on self- and cross-attention.

`add_k_proj` and `add_v_proj` are the keys and values of the image in image-to-video models.

Source: Flow-GRPO's Wan 2.1 script, rank 32, alpha 64. A run file that gives some fields of `lora`
gets the others from `Lora`, whose `target_modules` are those of another transformer.
"""
VIDEO = Video(height=480, width=832, num_frames=81, fps=16.0)
"""Video format that Wan 2.1 was released for."""


class Wan(VideoPolicy):
    """Wraps a `WanPipeline` folder or hub identifier with one network as a text-to-video policy.

    `guidance` above 1 makes the guided velocity the policy, at two evaluations each. The timestep
    input is that of the pipeline's scheduler: floor(1000 sigma) with UniPC, whose times are
    integers (at a shift of 1 rounding may make one of them larger by 1), 1000 sigma with an Euler
    scheduler. The schedule is the scheduler's own, shifted by the value in its file or by
    `video.shift`; UniPC starts just below 1. Steps along it are those of flowalign's transition
    kernels, not UniPC's, which look back at earlier steps.

    With `memory.decode_frames`, the first latent frame is decoded alone and then that many at a
    time; convolution states are carried over, so the frames equal those of decoding at once.
    Without it the decoder also takes one latent frame at a time, but re-concatenates its frames
    after each: the peak then is more than twice the video.
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
        super().__init__(path, video, lora, precision, memory)
        if memory.tile and memory.decode_frames is not None:
            raise ValueError(
                "memory.tile with memory.decode_frames: Wan decodes a tile with all its frames; "
                "give one of the two"
            )
        self.guidance, self.max_sequence_length = guidance, max_sequence_length
        self.evaluations_per_velocity = 2 if guidance > 1 else 1

    def shape_of_latents(
        self, transformer: Mapping[str, Any], vae: Mapping[str, Any]
    ) -> tuple[int, ...]:
        found = 1 if setting_of(self.pipeline_class, self.path, "boundary_ratio") is None else 2
        if found != self.num_networks:
            raise ValueError(
                f"{self.path} has {found} network(s), {type(self).__name__} wants "
                f"{self.num_networks}: for two networks are pipelines.wan22.Wan22 and, from a "
                "first frame, pipelines.wan22_i2v.Wan22I2V; for one pipelines.wan.Wan and others"
            )
        channels = vae["z_dim"] + self.condition_channels(vae)
        if transformer["in_channels"] != channels:
            raise ValueError(
                f"the network of {self.path} takes {transformer['in_channels']} channels, "
                f"{type(self).__name__} gives it {channels}:\n"
                "text-to-video is pipelines.wan.Wan, image-to-video pipelines.wan_i2v.WanI2V, "
                "that of Wan 2.2 5B pipelines.wan22_i2v.WanTI2V"
            )
        return super().shape_of_latents(transformer, vae)

    def condition_channels(self, vae: Mapping[str, Any]) -> int:  # noqa: ARG002 (WanI2V uses it)
        """Return the number of input channels that the network gets beside those of the latents."""
        return 0

    def latent_unit(self, vae: Mapping[str, Any]) -> tuple[int, int, int]:
        return vae["z_dim"], vae["scale_factor_temporal"], vae["scale_factor_spatial"]

    def patch(self, transformer: Mapping[str, Any]) -> tuple[int, int, int]:
        frames, rows, columns = transformer["patch_size"]
        return frames, rows, columns

    def statistics(self, vae: Any) -> tuple[Tensor, Tensor]:
        return torch.tensor(vae.config.latents_mean), torch.tensor(vae.config.latents_std)

    def sigmas(self, scheduler: Any, num_steps: int) -> Tensor:
        scheduler.set_timesteps(num_steps)
        if scheduler.sigmas[0] > 1:
            raise ValueError(
                f"the scheduler of {self.path} ({type(scheduler).__name__}) has sigmas up to "
                f"{float(scheduler.sigmas[0]):.3g}, not those of a flow;\n"
                "UniPC needs use_flow_sigmas and prediction_type flow_prediction"
            )
        return scheduler.sigmas.clone()

    def load(self, device: torch.device) -> None:
        super().load(device)
        probe = scheduler_of(self.pipe.scheduler.config)
        probe.set_timesteps(2)
        self.whole_times = not probe.timesteps.is_floating_point()
        self.time_per_token = bool(setting_of(self.pipeline_class, self.path, "expand_timesteps"))

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Cond:
        guided = self.guidance > 1
        with self.text_encoders():
            text, text_neg = self.pipe.encode_prompt(
                prompts_of(requests),
                do_classifier_free_guidance=guided,
                device=self.denoiser.device,
                max_sequence_length=self.max_sequence_length,
            )
        return {"text": text, "text_neg": text_neg} if guided else {"text": text}

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
        vae, together = self.pipe.vae, self.memory.decode_frames
        if together is None:
            yield vae.decode(z, return_dict=False)[0]
            return
        z = vae.post_quant_conv(z)
        states = [None] * sum(isinstance(m, WanCausalConv3d) for m in vae.decoder.modules())
        chunks = [z[:, :, :1], *z[:, :, 1:].split(together, 2)]
        for k, chunk in enumerate(chunks):
            if chunk.shape[2]:
                frames = vae.decoder(chunk, feat_cache=states, feat_idx=[0], first_chunk=k == 0)
                yield unpatchify(frames, vae.config.patch_size or 1).clamp(-1, 1)
