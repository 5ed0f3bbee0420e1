"""Define the interface of a model: what losses, rollouts and plans need from a policy."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flowalign.types.input_spec import InputSpec
from flowalign.types.model_plan import ModelPlan
from flowalign.types.request import Request
from flowalign.types.setup import Setup
from flowalign.types.speed import Reduced
from flowalign.types.trajectory import Cond

ExportTarget = Literal["diffusers", "peft", "comfyui", "merged"]
"""Who reads exported weights: an adapter for one of three programs, or a whole pipeline."""
ExportDtype = Literal["fp32", "bf16", "fp16"]
"""Precision of exported weights."""


@runtime_checkable
class VelocityField(Protocol):
    """Predicts velocities: all that a frozen reference offers, and that losses need of a policy."""

    def velocity(
        self, x: Float[Tensor, "n *latent"], sigma: Float[Tensor, "*n"], cond: Cond
    ) -> Float[Tensor, "n *latent"]:
        """Return dx / dsigma in float32, guidance included; sigma is one time, or one per row."""
        ...


class Policy(ABC):
    """Defines a flow model with its text encoder and decoder. Implementations: `pipelines/`.

    What only some policies can do is a part, which is None where they cannot.
    """

    denoiser: nn.Module
    """The network being trained; the rest of the pipeline is frozen."""
    evaluations_per_velocity: int
    """Network evaluations that one call of `velocity` costs per sample: 2 with guidance."""

    input_spec: InputSpec = InputSpec()
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

    network: "TrainedNetwork | None" = None
    """Network whose weights can be stored, accelerated, divided and exported in several ways."""

    text_encoder: "PromptEncoder | None" = None
    """Encoders of prompts that can be read and freed separately from the other components."""

    renderer: "DifferentiableDecoder | None" = None
    """Decoder with a gradient to the latents, for rewards that have one."""

    user_conditioning: "UserConditioning | None" = None
    """Conditioning on the person who asks."""

    @abstractmethod
    def velocity(
        self, x: Float[Tensor, "n *latent"], sigma: Float[Tensor, "*n"], cond: Cond
    ) -> Float[Tensor, "n *latent"]:
        """Return dx / dsigma in float32, guidance included; sigma is one time, or one per row."""

    def check_setup(self, setup: Setup) -> None:
        """Raise ValueError for settings that this policy cannot follow; reads no weights."""
        if changes := setup.changes():
            raise ValueError(
                f"{changes[0]}, but {type(self).__name__} has no flowalign.types.TrainedNetwork; "
                "leave it out"
            )

    @abstractmethod
    def plan(self) -> ModelPlan:
        """Return sizes from configuration files alone; raise ValueError for an unusable model."""

    @abstractmethod
    def load(self, device: torch.device) -> None:
        """Read the weights. Constructors are cheap; everything below needs this first."""

    @abstractmethod
    def encode(self, requests: Sequence[Request]) -> Cond:
        """Return the conditioning on requests that fit `input_spec`, one row per request."""

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


class TrainedNetwork(ABC):
    """Stores, divides and exports the denoiser, or the denoisers, of a policy as a run asks."""

    setup: Setup = Setup()
    """How `load` stores weights and accelerates the network, and `plan` counts them."""

    loads_to_cpu: bool = False
    """Whether `load` leaves the trained networks in main memory, from where they are sharded."""

    frozen_copy: Callable[[], nn.Module] | None = None
    """Makes a frozen copy of the denoiser as it is now, sharded like it, where all of it is trained
    and sharded; all processes must call it. None: weights are whole."""

    @abstractmethod
    def modules(self) -> Sequence[tuple[nn.Module, Sequence[nn.Module]]]:
        """Return the loaded trained networks, each with its `blocks`."""

    @abstractmethod
    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """Return the blocks that one of these networks, or a copy, repeats."""

    @abstractmethod
    def divide_context(self, mesh: DeviceMesh, meet: Callable[[str], None]) -> None:
        """Evaluate the loaded networks together with the other processes of a mesh.

        The mesh has the dimensions `ring`, of one process, and `ulysses`. `meet` is called before
        each evaluation with what is evaluated. From then on the gradient of a parameter is a part,
        and the parts of all processes sum to it.
        """

    @abstractmethod
    def reduce_precision(self, precision: Reduced) -> AbstractContextManager[None]:
        """Compute velocities in a lower precision inside the context; weights stay as they are."""

    @abstractmethod
    def check_export(self, folder: str, target: ExportTarget) -> None:
        """Raise ValueError if what `save_weights` wrote to a folder cannot be exported.

        It reads configurations, names and shapes, and no weights.
        """

    @abstractmethod
    def export(
        self, policy: Policy, out: str, target: ExportTarget, dtype: ExportDtype
    ) -> float | None:
        """Write the weights of the loaded policy, which is of no further use.

        Returns the largest difference of what the target's public loader reads back; None where
        that loader is not at hand.
        """


class PromptCache(ABC):
    """Keeps the conditioning on requests, so that encoders need not stay."""

    @abstractmethod
    def conditioning(self, policy: Policy, requests: Sequence[Request]) -> Cond:
        """Return what `policy.encode` would, on the policy's device; encode what is missing."""


class PromptEncoder(ABC):
    """Reads and frees the encoders of prompts of a policy separately from its other components."""

    cache: PromptCache | None = None
    """Source of conditioning. With one, `load` reads no encoders of prompts."""

    @abstractmethod
    def digest_files(self) -> str:
        """Return a digest of the files that `encode` depends on; reads no weights into memory."""

    @abstractmethod
    def describe_settings(self, policy: Policy) -> str:
        """Return the settings of a policy that `encode` may depend on, as one text."""

    @abstractmethod
    def read(self, device: torch.device) -> None:
        """Move the encoders of prompts to a device, and read them first if they are not there."""

    @abstractmethod
    def free(self) -> None:
        """Forget the encoders of prompts."""

    @abstractmethod
    def probe_requests(self) -> Sequence[Request]:
        """Return the requests that the verification of saved weights encodes."""


class UserConditioning(ABC):
    """Conditions a policy on users."""

    @abstractmethod
    def add_users(self, cond: Cond, users: Sequence[str]) -> Cond:
        """Return the conditioning of these users, one per row; "" is an unknown user."""

    @abstractmethod
    def check_user(self, user: str) -> None:
        """Raise ValueError for a user whom the policy cannot tell from others; needs no weights."""


class DifferentiableDecoder(ABC):
    """Decodes with a gradient to the latents."""

    @abstractmethod
    def render(
        self, x: Float[Tensor, "n *latent"], frames: Sequence[int] | None = None
    ) -> Float[Tensor, "n F 3 H W"]:
        """Decode like `Policy.decode`, with a gradient; of clips only these frames, in this order.

        The decoder recomputes its activations in the backward pass where it can.
        """

    @abstractmethod
    def render_bytes(self, latent_shape: Sequence[int]) -> int:
        """Return the peak bytes of `render` and its backward pass, per sample; needs no weights."""
