"""Load the bundled toy model, which trains in a minute on one CPU core."""

from typing import Any

from flowalign.utils.files import bundled
from pipelines.parts.libraries import diffusers


def toy_pipeline() -> Any:
    """Return a `StableDiffusion3Pipeline` with 1.6 million parameters, which draws shapes.

    It makes images of 32 x 32 pixels for prompts such as "two blue squares".
    """
    pipe = diffusers.StableDiffusion3Pipeline.from_pretrained(bundled("assets/shapes/sd3"))
    pipe.set_progress_bar_config(disable=True)
    return pipe
