"""Define what a model takes, what it decodes, and the memory that it needs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from jaxtyping import Float
from torch import Tensor

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


@dataclass(frozen=True)
class Sound:
    """Sound of one clip."""

    waveform: Float[Tensor, "C S"]
    """Amplitudes in [-1, 1], one row per channel."""
    rate: int
    """Amplitudes per second."""


class SoundDecoder(ABC):
    """Decoder of the sound of clips that a policy makes together with their frames."""

    @abstractmethod
    def decode_sound(self, x: Float[Tensor, "n *latent"]) -> list[Sound]:
        """Decode the sound of clean latents, on the CPU."""


class DifferentiableDecoder(ABC):
    """Decoder with a gradient to the latents."""

    @abstractmethod
    def render(
        self, x: Float[Tensor, "n *latent"], frames: Sequence[int] | None = None
    ) -> Float[Tensor, "n F 3 H W"]:
        """Decode like `Policy.decode`, with a gradient.

        For clips, `frames` selects and orders the frames; None: all. The decoder recomputes its
        activations in the backward pass if it supports that.
        """

    @abstractmethod
    def render_bytes(self, latent_shape: Sequence[int]) -> int:
        """Return the peak bytes of `render` and its backward pass, per sample; needs no weights."""


@dataclass(frozen=True)
class Saving:
    """Setting of a policy that lowers one part of its memory."""

    part: Literal["activations", "decoding", "recast weights", "text encoders", "weights"]
    """Part of the memory that the setting lowers."""
    setting: str
    """Key and value in run-file syntax: "policy.gradient_checkpointing: true"."""
    saved_bytes: int
    """Bytes saved; per sample if the part is counted per sample."""


@dataclass(frozen=True)
class ModelPlan:
    """Sizes of a policy that are known before its weights are loaded."""

    latent_shape: tuple[int, ...]
    """Shape of one latent without the sample axis: (C, H, W), or (C, F, H, W) for videos."""
    parameters: int
    """Number of parameters of the denoiser."""
    trainable: int
    """Number of parameters that are trained."""
    bytes_per_parameter: int | float
    """Average stored bytes per parameter, in the policy's precision or quantized."""
    activation_bytes: int
    """Bytes kept for the backward pass, per sample of a micro-batch; a rough estimate."""
    sigmas: Callable[[int], Float[Tensor, "S"]]
    """Function from a number of steps to the schedule."""
    decode_bytes: int = 0
    """Peak bytes of decoding, per sample that is decoded at once; a rough estimate."""
    decodes_together: bool = True
    """Whether a micro-batch is decoded at once instead of one sample after another."""
    text_bytes: int = 0
    """Bytes of text encoders that stay on the device, plus the VAE if its size is known."""
    offloaded_bytes: int = 0
    """Bytes of text encoders that are kept in main memory."""
    encoder_bytes: int = 0
    """Bytes of the prompt encoders; `text_bytes` and `offloaded_bytes` include them."""
    networks: int = 1
    """Number of equal networks among the parameters, such as experts; they are saved and verified
    one at a time."""
    gathered_parameters: int = 0
    """Parameters that a sharded process gathers at once: the largest block, and everything outside
    the blocks."""
    recomputes: bool = False
    """Whether the backward pass recomputes activations (gradient checkpointing)."""
    recast_bytes: int = 0
    """Bytes of quantized weights that the backward pass keeps in the policy's precision."""
    savings: Sequence[Saving] = ()
    """Settings that would lower the memory further; empty if all are in use."""
    evaluation_flops: Callable[[], int] = field(default=int, compare=False)
    """Function that counts the floating-point operations of one network evaluation of one sample,
    without gradient. It returns 0 if the number is unknown."""
    decode_flops: Callable[[], int] = field(default=int, compare=False)
    """The same for decoding one sample."""
