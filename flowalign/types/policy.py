"""Define the interface of a model: what losses, rollouts and plans need from a policy."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from flowalign.types.request import Request
from flowalign.types.trajectory import Cond


@dataclass(frozen=True)
class Saving:
    """Describes one setting of a policy that lowers one part of its memory."""

    part: Literal["activations", "decoding", "recast weights", "text encoders", "weights"]
    """Part of the memory that the setting lowers."""
    setting: str
    """Key and value as a run file has them: "policy.gradient_checkpointing: true"."""
    saved_bytes: int
    """Bytes saved, per sample where the part is counted per sample."""


@dataclass(frozen=True)
class ModelPlan:
    """Holds what is known of a policy before its weights are read."""

    latent_shape: tuple[int, ...]
    """Shape of one latent without the sample axis: (C, H, W), or (C, F, H, W) for videos."""
    parameters: int
    """Number of parameters of the denoiser."""
    trainable: int
    """Number of parameters that are trained."""
    bytes_per_parameter: int | float
    """Bytes of one parameter as it is stored, on average: in the policy's precision or less."""
    activation_bytes: int
    """Bytes kept for the backward pass, per sample of a micro-batch; a rough estimate."""
    sigmas: Callable[[int], Float[Tensor, "S"]]
    """Maps a number of steps to the schedule."""
    decode_bytes: int = 0
    """Bytes at the peak of decoding, per sample that is decoded with others; a rough estimate."""
    decodes_together: bool = True
    """Whether a micro-batch is decoded at once, and not one sample after another."""
    text_bytes: int = 0
    """Bytes of text encoders that stay on the device, and of the VAE where its size is known."""
    offloaded_bytes: int = 0
    """Bytes of text encoders that are kept in main memory."""
    encoder_bytes: int = 0
    """Bytes of the encoders of prompts, which are among the two above."""
    networks: int = 1
    """Number of equal networks among the parameters, such as experts; saved and verified one at a
    time."""
    gathered_parameters: int = 0
    """Parameters that sharded processes hold whole at once: the largest block, and all that is
    around the blocks."""
    recast_bytes: int = 0
    """Bytes of weights that are stored in fewer bits, and that the backward pass keeps in the
    policy's precision."""
    savings: Sequence[Saving] = ()
    """Settings that would lower the memory further; empty if all are in use."""


@dataclass(frozen=True)
class Takes:
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


class VelocityField(ABC):
    """Predicts velocities: all that a frozen reference offers, and that losses need of a policy."""

    @abstractmethod
    def velocity(
        self, x: Float[Tensor, "n *latent"], sigma: Float[Tensor, "*n"], cond: Cond
    ) -> Float[Tensor, "n *latent"]:
        """Return dx / dsigma in float32, guidance included; sigma is one time, or one per row."""


class Policy(VelocityField):
    """Defines a flow model with its text encoder and decoder. Implementations: `pipelines/`."""

    denoiser: nn.Module
    """The network being trained; the rest of the pipeline is frozen."""
    evaluations_per_velocity: int
    """Network evaluations that one call of `velocity` costs per sample: 2 with guidance."""

    takes: Takes = Takes()
    """What `encode` is given with each prompt."""

    guidance: float = 1.0
    """Classifier-free guidance scale of `velocity`; 1 is no guidance."""

    no_media: str = ""
    """Why `embed` takes no stored media, as a predicate of this class; empty if it does."""

    fps: float | None = None
    """Frames per second of the decoded clips; None for pictures."""

    num_frames: int | None = None
    """Frames of a decoded clip, and of those that `embed` takes; None for pictures."""

    precision: Literal["fp32", "bf16", "fp16"]
    """Precision of the network; states, sigmas and log-probabilities are float32 regardless."""

    @abstractmethod
    def plan(self) -> ModelPlan:
        """Return sizes from configuration files alone; raise ValueError for an unusable model."""

    @abstractmethod
    def load(self, device: torch.device) -> None:
        """Read the weights. Constructors are cheap; everything below needs this first."""

    @abstractmethod
    def encode(self, requests: Sequence[Request]) -> Cond:
        """Return the conditioning on prompts and on what `takes` names, one row per request."""

    @abstractmethod
    def schedule(self, num_steps: int) -> Float[Tensor, "S"]:
        """Return the decreasing sigmas of the model's own sampler, down to 0.

        They start at 1, or lower for models that were never trained on pure noise.
        """

    @abstractmethod
    def noise(self, num_samples: int, generator: torch.Generator) -> Float[Tensor, "n *latent"]:
        """Draw initial states on the CPU, so that a seed means the same on every machine."""

    @abstractmethod
    def decode(self, x: Float[Tensor, "n *latent"]) -> Float[Tensor, "n F 3 H W"]:
        """Decode clean latents to media in [0, 1]."""

    def check_stored_media(self, key: str) -> None:
        """Raise ValueError if `embed` takes no stored media, which the run file has at `key`."""
        if self.no_media:
            raise ValueError(f"{key}: {type(self).__name__} {self.no_media}")

    @abstractmethod
    def embed(self, media: Float[Tensor, "n F 3 h w"]) -> Float[Tensor, "n *latent"]:
        """Encode media in [0, 1] to clean latents, the mode of the encoder's distribution.

        Media are resized to cover the policy's own size, and cropped to it from the centre.
        """

    @abstractmethod
    def encoders(self) -> tuple[str, str]:
        """Return identities of the media and the text encoder; equal ones encode alike."""

    @abstractmethod
    def save_weights(self, folder: str) -> None:
        """Write the trained weights in the form that the model's own pipeline loads."""

    @abstractmethod
    def load_weights(self, folder: str) -> None:
        """Read what `save_weights` wrote; raise ValueError for weights of another model."""

    @abstractmethod
    def verify_weights(self, folder: str) -> float:
        """Return the largest difference of this policy from a new pipeline that loads `folder`."""


class Personal(ABC):
    """Marks a `Policy` that is conditioned on users."""

    @abstractmethod
    def with_users(self, cond: Cond, users: Sequence[str]) -> Cond:
        """Return the conditioning of these users, one per row; "" is an unknown user."""

    @abstractmethod
    def check_user(self, user: str) -> None:
        """Raise ValueError for a user whom the policy cannot tell from others; needs no weights."""


class Renders(ABC):
    """Marks a `Policy` that decodes with a gradient to the latents, for rewards that have one."""

    @abstractmethod
    def render(
        self, x: Float[Tensor, "n *latent"], frames: Sequence[int] | None = None
    ) -> Float[Tensor, "n F 3 H W"]:
        """Decode like `decode`, with a gradient; of clips only the given frames, in that order.

        The decoder recomputes its activations in the backward pass where it can.
        """

    @abstractmethod
    def render_bytes(self) -> int:
        """Return the peak bytes of `render` and its backward pass, per sample; needs no weights."""


ExportTarget = Literal["diffusers", "peft", "comfyui", "merged"]
"""Who reads exported weights: an adapter for one of three programs, or a whole pipeline."""
ExportDtype = Literal["fp32", "bf16", "fp16"]
"""Precision of exported weights."""


class Exportable(ABC):
    """Marks a `Policy` that writes its weights in the forms that other programs read."""

    @abstractmethod
    def check_export(self, folder: str, target: ExportTarget) -> None:
        """Raise ValueError if what `save_weights` wrote to a folder cannot be exported.

        It reads configurations, names and shapes, and no weights.
        """

    @abstractmethod
    def export_weights(self, out: str, target: ExportTarget, dtype: ExportDtype) -> float | None:
        """Write the weights of the loaded policy, which is of no further use.

        Returns the largest difference of what the target's public loader reads back; None where
        that loader is not at hand.
        """
