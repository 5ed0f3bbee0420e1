"""Read and write clean latents as files, tagged with their encoder, for direct training.

A policy that trains on latents it generated skips its decoder, a video codec and its encoder.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flowalign.data.media.decode import MediaProblem
from flowalign.data.media.media import Media
from flowalign.utils.files import atomic_write

_NAME, _ENCODER = "latent", "encoder"


def is_latent(medium: Media) -> bool:
    """Return whether the file name ends in .safetensors, which marks a latent."""
    return medium.path is not None and medium.path.endswith(".safetensors")


def save_latent(path: Path, latent: Float[Tensor, "*latent"], encoder: str) -> None:
    """Write a latent atomically; `encoder` is the first of `Policy.encoders()`."""
    with atomic_write(path) as partial:
        save_file({_NAME: latent.detach().cpu().contiguous()}, partial, {_ENCODER: encoder})


def read_latent(path: str, encoder: str) -> Float[Tensor, "*latent"]:
    """Read the latent of a file.

    Raises:
        MediaProblem: The file is missing or damaged, or belongs to another encoder.
    """
    with _open_file(path) as file:
        found = (file.metadata() or {}).get(_ENCODER)
        if found != encoder:
            raise MediaProblem(
                f"latent of another encoder: {path} was encoded by {found}, "
                f"the policy has {encoder}"
            )
        return file.get_tensor(_NAME)


def latent_shape(path: str) -> tuple[int, int, int]:
    """Return width, height and frames of a latent from the file's header.

    Raises:
        MediaProblem: The file is damaged, or does not contain the latent of a clip.
    """
    with _open_file(path) as file:
        shape = file.get_slice(_NAME).get_shape()
    if len(shape) != 4:
        raise MediaProblem(f"not the latent of a clip: {path} has shape {shape}, not [C, F, H, W]")
    return shape[3], shape[2], shape[1]


@contextmanager
def _open_file(path: str) -> Iterator[Any]:
    if not Path(path).is_file():
        raise MediaProblem(f"missing file: {path}")
    try:
        with safe_open(path, "pt") as file:
            if list(file.keys()) != [_NAME]:
                raise MediaProblem(f"not the latent of a clip: {path} holds {sorted(file.keys())}")
            yield file
    except SafetensorError as error:
        raise MediaProblem(f"damaged latent: {path} ({error})") from error
