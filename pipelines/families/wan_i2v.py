"""Wraps Wan image-to-video with one network: every request has its first frame."""

from torch import Tensor

from flowalign.types import InputSpec
from pipelines.families.first_frame import FixedFirstFrame, mask_first_times
from pipelines.families.wan import Wan
from pipelines.parts.folder import Config


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

    def times(self, x: Tensor, sigma: Tensor) -> Tensor:
        time = super().times(x, sigma)
        return mask_first_times(time, time.shape[1], x.shape[2])
