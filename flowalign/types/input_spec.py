"""Define the references and masks that a policy takes with a prompt."""

from dataclasses import dataclass
from typing import Literal

from flowalign.types.request import Request


@dataclass(frozen=True)
class InputSpec:
    """Inputs that a policy needs with a prompt; requests that lack one are rejected."""

    references: tuple[int, int] = (0, 0)
    """Smallest and largest number of references of a request."""
    mask: bool = False
    """Whether every request needs an inpainting mask for the first reference."""
    kind: Literal["none", "source", "first_frame"] = "none"
    """Kind of references. source: images to edit. first_frame: first frame of a clip. none: no
    references."""
    frames: tuple[int, int] = (1, 1)
    """Smallest and largest number of frames of a reference; an image has one."""
    size: tuple[int, int] | None = None
    """Height and width that every reference must have. None: any, because the policy resizes."""
    crop: tuple[int, int] | None = None
    """Height and width to which references and masks are resized and centre-cropped; the mask must
    have a hole inside the crop. None: no crop, the hole may be anywhere."""

    def misfit(self, request: Request) -> str:
        """Return why the references or the mask of a request do not fit; "" if they fit."""
        fewest, most = self.references
        given = len(request.references)
        wanted = f"{fewest}" if fewest == most else f"{fewest} to {most}"
        if most and not fewest <= given <= most:
            return f"takes {wanted} {self.kind} references, and the request has {given}"
        if self.mask and request.mask is None:
            return "takes a mask, and the request has none"
        if request.mask is not None and not given:
            return f"has no source for the mask {request.mask.name}"
        if request.mask is not None and not self.mask:
            return f"takes no mask, and the request has {request.mask.name}"
        return ""

    def misshapen(self, frames: int, height: int, width: int) -> str:
        """Return why the shape of a reference does not fit; "" if it fits."""
        fewest, most = self.frames
        if not fewest <= frames <= most:
            wanted = f"{fewest}" if fewest == most else f"{fewest} to {most}"
            return f"takes references of {wanted} frame{'s' * (most > 1)}, and this has {frames}"
        if self.size not in (None, (height, width)):
            wanted = f"{self.size[1]} x {self.size[0]}"
            return f"takes references of {wanted} pixels, and this has {width} x {height}"
        return ""
