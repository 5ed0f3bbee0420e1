"""Define which references and masks a policy is given with a prompt."""

from dataclasses import dataclass
from typing import Literal

from flowalign.types.request import Request


@dataclass(frozen=True)
class InputSpec:
    """Says what a policy is given with a prompt, so that a run that gives less is refused."""

    references: tuple[int, int] = (0, 0)
    """Fewest and most references of a request."""
    mask: bool = False
    """Whether every request has a mask of where the first reference is painted anew."""
    kind: Literal["none", "source", "first_frame"] = "none"
    """What references are: pictures to edit, the first frame of a clip, or not taken."""
    frames: tuple[int, int] = (1, 1)
    """Fewest and most frames of a reference; a picture has one."""
    size: tuple[int, int] | None = None
    """Height and width that every reference must have. None: any, as the policy resizes them."""
    crop: tuple[int, int] | None = None
    """Height and width that references and masks are resized to cover, and of which the centre is
    kept; the mask must have a hole there. None: a hole anywhere will do."""

    def misfit(self, request: Request) -> str:
        """Return how the number of references, or the mask, of a request does not fit; or ""."""
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
        """Return how the shape of a reference does not fit; or ""."""
        fewest, most = self.frames
        if not fewest <= frames <= most:
            wanted = f"{fewest}" if fewest == most else f"{fewest} to {most}"
            return f"takes references of {wanted} frame{'s' * (most > 1)}, and this has {frames}"
        if self.size not in (None, (height, width)):
            wanted = f"{self.size[1]} x {self.size[0]}"
            return f"takes references of {wanted} pixels, and this has {width} x {height}"
        return ""
