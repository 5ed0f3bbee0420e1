"""Computes sizes of reference images for the text encoder and network of Qwen-Image-Edit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from flowalign.types import PositiveInt
from flowalign.utils.imports import LazyModule

_pipeline = LazyModule("diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus")


@dataclass(frozen=True, kw_only=True)
class References:
    """Number and sizes of a request's images."""

    most: PositiveInt = 1
    """Maximum number of images per request."""
    area: PositiveInt = 1024 * 1024
    """Pixels of each image that the network sees. Default: the pipeline's 1024 x 1024."""
    max_tokens: PositiveInt = 1024
    """Maximum tokens of an instruction with its images; all requests are padded to it."""

    def grid(self, proportion: float, patch: int, path: str) -> tuple[int, int]:
        """Return rows and columns of an image's tokens of `patch` pixels, for the model at `path`.

        Raises:
            ValueError: The area is too small for one token.
        """
        width, height = _pipeline.calculate_dimensions(self.area, proportion)
        if height < patch or width < patch:
            raise ValueError(
                f"policy.references.area is {self.area}: images of {width}x{height} are smaller "
                f"than one token of {path}"
            )
        return height // patch, width // patch


def for_text(pipe: Any, pictures: Sequence[Image.Image], proportion: float) -> list[Image.Image]:
    """Return images in the size that the text encoder sees."""
    width, height = _pipeline.calculate_dimensions(_pipeline.CONDITION_IMAGE_SIZE, proportion)
    return [pipe.image_processor.resize(one, height, width) for one in pictures]
