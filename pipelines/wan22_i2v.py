"""Wraps Wan 2.2 image-to-video as flowalign policies: two networks (A14B), or one (5B)."""

from collections.abc import Mapping, Sequence
from typing import Any

from diffusers import WanImageToVideoPipeline
from torch import Tensor

from flowalign.types import Cond, Guidance, PositiveInt, Request, Takes
from pipelines.base import Precision
from pipelines.first_frame import encoded, led, shown, times_of_others
from pipelines.folder import setting_of
from pipelines.video import Memory, Video
from pipelines.wan import LORA, VIDEO, Wan
from pipelines.wan22 import Experts, Wan22
from pipelines.wan_i2v import WanI2V
from pipelines.weights import Lora


class Wan22I2V(Wan22, WanI2V):
    """Wraps a `WanImageToVideoPipeline` folder with two networks (Wan 2.2 A14B) as a policy.

    The first frame is a condition beside the state as for `WanI2V`, the networks are those of high
    and low noise as for `Wan22`. Released folders have no encoder of image features.
    """

    pipeline_class = WanImageToVideoPipeline

    def __init__(
        self,
        path: str,
        video: Video = VIDEO,
        guidance: Guidance = 3.5,
        experts: Experts = Experts(),  # noqa: B008 (frozen)
        lora: Lora | None = LORA,
        precision: Precision = "bf16",
        max_sequence_length: PositiveInt = 512,
        memory: Memory = Memory(),  # noqa: B008 (frozen)
    ):
        super().__init__(
            path, video, guidance, experts, lora, precision, max_sequence_length, memory
        )


class WanTI2V(Wan):
    """Wraps a folder of Wan 2.2 5B, which makes clips of text alone as well, for image-to-video.

    The one reference of a request is the first frame, see `pipelines.first_frame`: it stands in
    place of the first latent frame, whose tokens have time 0. Everything else is the same as for
    `Wan`.
    """

    pipeline_class = WanImageToVideoPipeline
    takes = Takes(references=(1, 1), kind="first_frame")

    def shape_of_latents(
        self, transformer: Mapping[str, Any], vae: Mapping[str, Any]
    ) -> tuple[int, ...]:
        if not setting_of(self.pipeline_class, self.path, "expand_timesteps"):
            raise ValueError(
                f"the network of {self.path} has one time for all tokens (no expand_timesteps): "
                "image-to-video is pipelines.wan_i2v.WanI2V, or wan22_i2v.Wan22I2V with two "
                "networks"
            )
        return super().shape_of_latents(transformer, vae)

    def encode(self, requests: Sequence[Request]) -> Cond:
        return {**super().encode(requests), "first": encoded(self, requests)}

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        first = cond["first"]
        return led(super().velocity(shown(x, first), sigma, cond), x, sigma, first)

    def times(self, x: Tensor, sigma: Tensor) -> Tensor:
        time = super().times(x, sigma)
        return times_of_others(time, time.shape[1], x.shape[2])
