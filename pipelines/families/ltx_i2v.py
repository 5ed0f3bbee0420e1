"""Wraps LTX-Video image-to-video as a flowalign policy: a request has its first frame."""

from torch import Tensor

from pipelines.families.first_frame import FixedFirstFrame, mask_first_times
from pipelines.families.ltx import LTX


class LTXI2V(FixedFirstFrame, LTX):
    """Wraps an `LTXImageToVideoPipeline` folder or hub identifier as an image-to-video policy.

    The single reference of a request is the first frame. It replaces the first latent frame, at
    time 0, see `first_frame`. The pipeline samples its latents from the encoder's distribution;
    this policy uses the mode. In all other respects the class equals `LTX`.
    """

    pipeline_class = "LTXImageToVideoPipeline"

    def times(self, x: Tensor, sigma: Tensor) -> Tensor:
        tokens = x[0, 0].numel()
        return mask_first_times(super().times(x, sigma), tokens, x.shape[2])
