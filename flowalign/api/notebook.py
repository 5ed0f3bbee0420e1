"""Show the samples of evaluations in notebooks."""

import sys
from collections.abc import Sequence
from typing import Any

from PIL import Image
from typing_extensions import override

from flowalign.runs.session import Callback

_MOST, _GAP = 8, 2


class NotebookSamples(Callback):
    """Row of the first samples of each evaluation, displayed below the cell; videos as frames."""

    @override
    def on_samples(self, step: int, images: Sequence[Any], prompts: Sequence[str]) -> None:
        """Display up to eight samples, a video by its first frame."""
        shown = [one if isinstance(one, Image.Image) else one[0] for one in images[:_MOST]]
        width, height = shown[0].size
        row = Image.new("RGB", (len(shown) * (width + _GAP), height), "white")
        for i, image in enumerate(shown):
            row.paste(image, (i * (width + _GAP), 0))
        sys.modules["IPython"].display.display(row)


def notebook_callbacks() -> list[Callback]:
    """Return the callback of notebooks if this process is the kernel of one."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return [NotebookSamples()] if hasattr(shell, "kernel") else []
