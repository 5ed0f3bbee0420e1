"""Wraps Wan as flowalign policies: text to video and image to video.

Wan 2.1 and Wan 2.2 (5B) have one network. Wan 2.2 (A14B) has two, for high and for low noise.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowalign.types import (
    Cond,
    Guidance,
    InputSpec,
    ModelPlan,
    PositiveInt,
    Request,
    UnitInterval,
    prompts_of,
)
from pipelines.families.first_frame import FixedFirstFrame, check_text_length, encode_conditions
from pipelines.network.schedules import has_whole_times
from pipelines.network.weights import ATTENTION, Lora, Precision
from pipelines.parts.encoding import stream_frames
from pipelines.parts.evaluation import with_negatives
from pipelines.parts.folder import Config, Folder, check_channels
from pipelines.video import Memory, Video, VideoCodec, VideoPolicy

_NETWORKS = (
    "for two networks use pipelines.Wan22 or, from a first frame, pipelines.Wan22I2V; for one "
    "network use pipelines.Wan or others"
)
_CHANNELS = (
    "text-to-video is pipelines.Wan, image-to-video is pipelines.WanI2V, or pipelines.WanTI2V for "
    "Wan 2.2 5B"
)


_NAMES = {"high": "transformer", "low": "transformer_2"}
"""Component names."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Division of the noise levels between the two networks."""

    guidance_2: Guidance | None = None
    """Guidance scale of the low-noise network; None uses the scale of the high-noise network."""
    boundary_ratio: UnitInterval | None = None
    """Share of 1000 timesteps from which the high-noise network is used; None uses the folder's
    value."""
    train: Literal["both", "high", "low"] = "both"
    """Networks to train; the other network stays frozen."""

    @property
    def trained(self) -> tuple[str, ...]:
        """Return the names of the trained components."""
        return tuple(_NAMES.values()) if self.train == "both" else (_NAMES[self.train],)


class TwoNetworks(nn.Module):
    """Network that routes each row to the high-noise or the low-noise network by its timestep.

    A batch may contain rows for both networks; each network sees only its own rows.
    """

    def __init__(self, high: Any, low: Any, boundary: float):
        super().__init__()
        self.high, self.low, self.boundary = high, low, boundary

    @property
    def device(self) -> torch.device:
        """Return the device of both networks."""
        return self.high.device

    def forward(
        self, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, **rest: Any
    ) -> tuple[Tensor, ...]:
        """Evaluate each row with the network for its timestep."""
        # One read of the host decides which networks run; `nonzero` would be one for each of them.
        high = (timestep >= self.boundary).tolist()
        rows_of = {side: [i for i, one in enumerate(high) if one == side] for side in (True, False)}
        sides = [(self.high, rows_of[True]), (self.low, rows_of[False])]
        answers = [
            network(
                hidden_states=hidden_states[rows],
                timestep=timestep[rows],
                encoder_hidden_states=encoder_hidden_states[rows],
                **rest,
            )[0]
            for network, rows in sides
            if rows
        ]
        order = torch.tensor(rows_of[True] + rows_of[False]).argsort().tolist()
        return (torch.cat(answers)[order],)


def join_experts(folder: Folder, experts: Experts, components: Mapping[str, Any]) -> TwoNetworks:
    """Join the two networks of a pipeline at the boundary of `experts`, by default the folder's."""
    ratio = experts.boundary_ratio
    if ratio is None:
        ratio = folder.setting("boundary_ratio")
    boundary = ratio * components["scheduler"].config.num_train_timesteps
    return TwoNetworks(**{side: components[n] for side, n in _NAMES.items()}, boundary=boundary)


LORA = Lora(target_modules=(*ATTENTION, "add_k_proj", "add_v_proj"))
"""Default adapter: attention, including attention to a first frame. Source: Flow-GRPO's Wan 2.1
script."""
VIDEO = Video(height=480, width=832, num_frames=81, fps=16.0)
"""Default video format, for which Wan 2.1 was released."""


class WanCodec(VideoCodec):
    """Encodes clips with statistics of each channel, and decodes them in exact chunks."""

    def channel_statistics(self) -> tuple[Tensor, Tensor]:
        config = self.vae.config
        values = [config.latents_mean, config.latents_std]
        mean, std = torch.tensor(values, dtype=torch.float32)
        return mean, std

    def pieces(self, z: Tensor) -> Iterator[Tensor]:
        together = self.memory.decode_frames
        return super().pieces(z) if together is None else stream_frames(self.vae, z, together)


class Wan(VideoPolicy):
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
        codec = WanCodec(video, memory)
        super().__init__(path, codec, lora, precision, guidance, max_sequence_length)
        if memory.tile:
            codec.refuse_decode_frames("with memory.tile Wan decodes all frames of a tile")

    def shape_of_latents(self, transformer: Config, vae: Config) -> tuple[int, ...]:
        channels, frames = vae["z_dim"], vae["scale_factor_temporal"]
        if self.sees_first_frame:
            check_text_length(self, transformer)
            channels += frames + vae["z_dim"]  # mask and latents of the frame
        there = 1 if self.folder.setting("boundary_ratio") is None else 2
        wanted = 2 if self.experts else 1
        if there != wanted:
            raise ValueError(
                f"{self.path} has {there} network(s), {type(self).__name__} needs {wanted}: "
                + _NETWORKS
            )
        check_channels(self, transformer, channels, _CHANNELS)
        return self.shape_of_clip(vae["z_dim"], frames, vae["scale_factor_spatial"], transformer)

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
        if self.sees_first_frame:
            cond |= encode_conditions(self, requests, text.dtype)
        return cond

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        time = self.times(x, sigma)
        v = self.evaluate(x, time, cond, "text")
        if self.guidance <= 1:
            return v
        v_neg = self.evaluate(x, time, cond, "text_neg")
        return v_neg + self._guidance_at(time) * (v - v_neg)

    def times(self, x: Tensor, sigma: Tensor) -> Tensor:
        time = super().times(x, sigma)
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


class WanI2V(Wan):
    """Wraps a `WanImageToVideoPipeline` folder or hub identifier as an image-to-video policy.

    The single reference of a request is the first frame. It is centre-cropped to the aspect ratio
    of the video, then processed as in the pipeline.

    In addition to the text, `cond` holds "image", the mask and latents of the first frame, which
    the network sees with the state. For networks that take image features, it also holds "clip";
    these networks need prompts of 512 tokens.
    """

    pipeline_class = "WanImageToVideoPipeline"
    input_spec = InputSpec(references=(1, 1), kind="first_frame")
    sees_first_frame = True


class WanTI2V(FixedFirstFrame, Wan):
    """Wraps a folder of Wan 2.2 5B, which also supports text-to-video, for image-to-video.

    The single reference of a request is the first frame. It replaces the first latent frame, and
    its tokens have time 0, see `first_frame`. In all other respects the class equals `Wan`.
    """

    pipeline_class = "WanImageToVideoPipeline"

    def shape_of_latents(self, transformer: Config, vae: Config) -> tuple[int, ...]:
        if not self.folder.setting("expand_timesteps"):
            raise ValueError(
                f"the network of {self.path} has one time for all tokens (no expand_timesteps): "
                "image-to-video is pipelines.WanI2V, or pipelines.Wan22I2V with two "
                "networks"
            )
        return super().shape_of_latents(transformer, vae)


class Wan22(Wan):
    """Wraps a `WanPipeline` folder with two networks (Wan 2.2 A14B) as a text-to-video policy.

    In all other respects it equals `Wan`. The 5B model of Wan 2.2 has one network, so use `Wan` for
    it. `guidance` is the scale of the high-noise network. If it is 1 or less, neither network is
    guided, as in the pipeline.

    The adapter of the first network is saved as usual, the adapter of the second one in the folder
    `transformer_2`: pipe.load_lora_weights(folder + "/transformer_2", load_into_transformer_2=True)
    """

    def __init__(
        self,
        path: str,
        video: Video = VIDEO,
        guidance: Guidance = 4.0,
        experts: Experts = Experts(guidance_2=3.0),
        lora: Lora | None = LORA,
        precision: Precision = "bf16",
        max_sequence_length: PositiveInt = 512,
        memory: Memory = Memory(),  # noqa: B008 (frozen)
    ):
        super().__init__(path, video, guidance, lora, precision, max_sequence_length, memory)
        self.experts, self.network.trained = experts, experts.trained
        self.network.assemble = partial(join_experts, self.folder, experts)

    def plan(self) -> ModelPlan:
        one = super().plan()
        trainable = len(self.network.trained) * one.trainable
        return replace(one, parameters=2 * one.parameters, trainable=trainable, networks=2)


class Wan22I2V(Wan22):
    """Wraps a `WanImageToVideoPipeline` folder with two networks (Wan 2.2 A14B) as a policy.

    As in `WanI2V`, the first frame is a condition in addition to the state. As in `Wan22`, there
    are networks for high and low noise. Released folders have no encoder of image features.
    """

    pipeline_class = "WanImageToVideoPipeline"
    input_spec = InputSpec(references=(1, 1), kind="first_frame")
    sees_first_frame = True

    def __init__(
        self,
        path: str,
        video: Video = VIDEO,
        guidance: Guidance = 3.5,
        experts: Experts = Experts(),
        lora: Lora | None = LORA,
        precision: Precision = "bf16",
        max_sequence_length: PositiveInt = 512,
        memory: Memory = Memory(),  # noqa: B008 (frozen)
    ):
        settings = lora, precision, max_sequence_length, memory
        super().__init__(path, video, guidance, experts, *settings)
