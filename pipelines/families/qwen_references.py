"""Sizes the pictures of Qwen-Image-Edit's requests, as text encoder and network see them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import (
    CONDITION_IMAGE_SIZE,
    calculate_dimensions,
)
from PIL import Image

from flowalign.types import PositiveInt


@dataclass(frozen=True, kw_only=True)
class References:
    """Configures the pictures of a request, as the text encoder and the network see them."""

    most: PositiveInt = 1
    """Number of pictures that a request may have."""
    area: PositiveInt = 1024 * 1024
    """Pixels of each picture that the network sees. Default: those of the pipeline."""
    max_tokens: PositiveInt = 1024
    """Tokens of an instruction together with its pictures, to which all are padded."""

    def grid(self, proportion: float, patch: int, path: str) -> tuple[int, int]:
        """Return rows and columns of a picture's tokens of `patch` pixels, for the model at `path`.

        Raises:
            ValueError: There are none.
        """
        width, height = calculate_dimensions(self.area, proportion)
        if height < patch or width < patch:
            raise ValueError(
                f"policy.references.area is {self.area}: pictures of {width}x{height} have no "
                f"tokens for {path}"
            )
        return height // patch, width // patch


def for_text(pipe: Any, pictures: Sequence[Image.Image], proportion: float) -> list[Image.Image]:
    """Return pictures of the size that the text encoder sees."""
    width, height = calculate_dimensions(CONDITION_IMAGE_SIZE, proportion)
    return [pipe.image_processor.resize(one, height, width) for one in pictures]
