"""Wraps LTX-Video image-to-video as a flowalign policy: a request comes with its first frame."""

from collections.abc import Sequence

from diffusers import LTXImageToVideoPipeline
from torch import Tensor

from flowalign.types import Cond, Request, Takes
from pipelines.first_frame import encoded, led, shown, times_of_others
from pipelines.ltx import LTX


class LTXI2V(LTX):
    """Wraps an `LTXImageToVideoPipeline` folder or hub identifier as an image-to-video policy.

    The one reference of a request is the first frame, see `pipelines.first_frame`: it stands in
    place of the first latent frame, at time 0. The pipeline draws its latents from the encoder's
    distribution; here they are the mode. Everything else is the same as for `LTX`.
    """

    pipeline_class = LTXImageToVideoPipeline
    takes = Takes(references=(1, 1), kind="first_frame")

    def encode(self, requests: Sequence[Request]) -> Cond:
        return {**super().encode(requests), "first": encoded(self, requests)}

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        first = cond["first"]
        return led(super().velocity(shown(x, first), sigma, cond), x, sigma, first)

    def times(self, x: Tensor, sigma: Tensor) -> Tensor:
        tokens = x[0, 0].numel()
        return times_of_others(super().times(x, sigma), tokens, x.shape[2])
