"""Define the interface of a model for losses, rollouts and plans."""

import copy
from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flowalign.types.model import (
    Attention,
    DifferentiableDecoder,
    InputSpec,
    ModelPlan,
    Reduced,
    Setup,
    SoundDecoder,
)
from flowalign.types.request import Request
from flowalign.types.trajectory import Cond

ExportTarget = Literal["diffusers", "peft", "comfyui", "merged"]
"""Format of exported weights: an adapter for one of three programs, or (merged) a pipeline."""
ExportDtype = Literal["fp32", "bf16", "fp16"]
"""Precision of exported weights."""


@runtime_checkable
class VelocityField(Protocol):
    """Velocity prediction, which losses need and which is all that a frozen reference provides."""

    def velocity(
        self, x: Float[Tensor, "n *latent"], sigma: Float[Tensor, "*n"], cond: Cond
    ) -> Float[Tensor, "n *latent"]:
        """Return dx / dsigma in float32, with guidance; sigma is one time or one per row."""
        ...


class Policy(metaclass=ABCMeta):
    """Flow model with its text encoder and decoder. Implementations: `pipelines/`.

    Optional abilities are separate parts (`network`, `text_encoder`, `renderer`,
    `user_conditioning`); a part is None if the policy lacks the ability.
    """

    denoiser: nn.Module
    """Network being trained; the rest of the pipeline is frozen."""
    evaluations_per_velocity: int
    """Network evaluations of one call of `velocity` per sample: 2 with guidance."""

    input_spec: InputSpec = InputSpec()
    """References and masks that `encode` needs with each prompt."""

    guidance: float = 1.0
    """Classifier-free guidance scale of `velocity`; 1 is no guidance."""

    has_guidance: bool = True
    """Whether the model has classifier-free guidance (default: True); a distilled guidance scale,
    which is an input of the network, does not count."""

    configured_guidance: float | None = None
    """Guidance scale from the run file, if `without_guidance` replaced it; else None."""

    @property
    def model_guidance(self) -> float:
        """Return the classifier-free guidance scale from the run file; 1 is no guidance."""
        return self.guidance if self.configured_guidance is None else self.configured_guidance

    def without_guidance(self) -> "Policy":
        """Return this policy without guidance, with shared weights; itself if it has none.

        Raises:
            ValueError: The policy's guidance cannot be turned off.
        """
        if self.evaluations_per_velocity > 1 and not self.has_guidance:
            raise ValueError(
                f"guidance is off, but {type(self).__name__} cannot leave its guidance out: set "
                "guidance to model"
            )
        if not self.has_guidance:
            return self
        plain = with_guidance(self, 1.0)
        plain.configured_guidance = self.model_guidance
        return plain

    no_media: str = ""
    """Reason why `embed` takes no stored media, as text after the class name; empty if it does."""

    no_features: str = ""
    """Reason why a critic cannot read the denoiser's features, like `no_media`; empty if it can."""

    fps: float | None = None
    """Frames per second of decoded clips; None for images."""

    num_frames: int | None = None
    """Number of frames of a decoded clip, and of the clips that `embed` takes; None for images."""

    precision: Literal["fp32", "bf16", "fp16"]
    """Precision of the network; states, sigmas and log-probabilities are float32 regardless."""

    network: "TrainedNetwork | None" = None
    """Options to quantize, compile, shard and export the trained network; or None."""

    text_encoder: "PromptEncoder | None" = None
    """Prompt encoders that are loaded and freed separately from the rest; or None."""

    renderer: DifferentiableDecoder | None = None
    """Decoder with a gradient to the latents, for differentiable rewards; or None."""

    sound_decoder: SoundDecoder | None = None
    """Decoder of the sound of clips; None for policies without sound."""

    user_conditioning: "UserConditioning | None" = None
    """Conditioning on the user who asks; or None."""

    modality_sizes: Mapping[str, int] = {}
    """Number of elements of each part of a flat state, such as video and audio, in order."""

    @abstractmethod
    def velocity(
        self, x: Float[Tensor, "n *latent"], sigma: Float[Tensor, "*n"], cond: Cond
    ) -> Float[Tensor, "n *latent"]:
        """Return dx / dsigma in float32, with guidance; sigma is one time or one per row."""

    def take_setup(  # noqa: B027 (most policies of users have no such settings)
        self, setup: Setup, rows: int, cache: "PromptCache | None"
    ) -> None:
        """Use the settings of a run, before `load`; only a policy with a `TrainedNetwork` has any.

        `rows` are those of a network call of the update; `cache` stores encoded prompts.
        """

    def check_setup(self, setup: Setup) -> None:
        """Raise ValueError for settings that this policy does not support; reads no weights."""
        if changes := setup.changes():
            raise ValueError(
                f"{changes[0]}, but {type(self).__name__} has no flowalign.types.TrainedNetwork; "
                "leave it out"
            )

    @abstractmethod
    def plan(self) -> ModelPlan:
        """Return sizes, read from config files only; raise ValueError for an unusable model."""

    @abstractmethod
    def load(self, device: torch.device) -> None:
        """Read the weights. Constructors are cheap; call this before any method below."""

    @abstractmethod
    def encode(self, requests: Sequence[Request]) -> Cond:
        """Return the conditioning of requests that fit `input_spec`, one row per request."""

    @abstractmethod
    def schedule(self, num_steps: int) -> Float[Tensor, "S"]:
        """Return the decreasing sigmas of the model's own sampler, down to 0.

        The first is 1, or less for models that were never trained on pure noise.
        """

    @abstractmethod
    def noise(self, num_samples: int, generator: torch.Generator) -> Float[Tensor, "n *latent"]:
        """Draw initial states on the CPU, so that a seed gives the same noise on every machine."""

    @abstractmethod
    def decode(self, x: Float[Tensor, "n *latent"]) -> Float[Tensor, "n F 3 H W"]:
        """Decode clean latents to media in [0, 1]."""

    def check_stored_media(self, key: str) -> None:
        """Raise ValueError, naming the run-file key `key`, if `embed` takes no stored media."""
        if self.no_media:
            raise ValueError(f"{key}: {type(self).__name__} {self.no_media}")

    @abstractmethod
    def embed(self, media: Float[Tensor, "n F 3 h w"]) -> Float[Tensor, "n *latent"]:
        """Encode media in [0, 1] to clean latents, the mode of the encoder's distribution.

        Media are resized and centre-cropped to the policy's size.
        """

    @abstractmethod
    def encoders(self) -> tuple[str, str]:
        """Return ids of the media and text encoders; encoders with equal ids encode identically."""

    @abstractmethod
    def save_weights(self, folder: str) -> None:
        """Write the trained weights in the format that the model's pipeline loads."""

    @abstractmethod
    def load_weights(self, folder: str) -> None:
        """Read weights from `save_weights`; raise ValueError for weights of another model."""

    @abstractmethod
    def verify_weights(self, folder: str) -> float:
        """Return the largest difference between this policy and a new pipeline from `folder`."""


def with_guidance(policy: Policy, scale: float) -> Policy:
    """Return the policy with another classifier-free guidance scale; 1 is no guidance.

    Weights are shared.
    """
    copied = copy.copy(policy)
    copied.guidance, copied.evaluations_per_velocity = scale, 2 if scale > 1 else 1
    return copied


def with_setup(
    policy: Policy, setup: Setup, rows: int = 1, cache: "PromptCache | None" = None
) -> Policy:
    """Return a policy that is not loaded with the settings of a run, see `take_setup`."""
    copied = copy.copy(policy)
    copied.take_setup(setup, rows, cache)
    return copied


def with_denoiser(policy: Policy, denoiser: nn.Module) -> Policy:
    """Return the policy with another network; everything else is shared."""
    copied = copy.copy(policy)
    copied.denoiser = denoiser
    return copied


class Sharder(Protocol):
    """Divides the parameters of networks over processes, which all call the same methods."""

    def add_all(self, networks: Sequence[tuple[nn.Module, Sequence[nn.Module]]]) -> None:
        """Shard the trained networks of a policy, which are paired with their blocks."""

    def copy_without_values(self, network: nn.Module) -> nn.Module:
        """Return a copy of a network without the values of its parameters."""
        ...

    def frozen_copy(
        self,
        network: nn.Module,
        empty: nn.Module,
        blocks_of: Callable[[nn.Module], Sequence[nn.Module]],
    ) -> nn.Module:
        """Return an equally sharded, frozen copy of a sharded network; `empty` has no values."""
        ...


class TrainedNetwork(ABC):
    """Denoiser, or denoisers, of a policy that can be quantized, compiled, sharded and exported."""

    setup: Setup = Setup()
    """Settings of weight storage and speed; `load` applies them and `plan` accounts for them."""
    gradient_checkpointing: bool = False
    """Whether the backward pass recomputes activations of the trained networks."""
    rows: int = 1
    """Number of rows of a network call of the update."""
    loads_to_cpu: bool = False
    """Whether `load` leaves the trained networks in main memory, to be sharded from there."""
    empty: nn.Module | None = None
    """Copy without values of a denoiser that is sharded and trained as a whole; else None."""
    frozen_copy: Callable[[], nn.Module] | None = None
    """Function that makes a frozen, equally sharded copy of the current denoiser when all of it is
    trained and sharded; all processes must call it. None: weights are not sharded."""

    @contextmanager
    def in_main_memory(self) -> Iterator[None]:
        """Let `load` leave the trained networks in main memory, to be sharded from there."""
        self.loads_to_cpu = True
        try:
            yield
        finally:
            self.loads_to_cpu = False

    def shard(self, denoiser: nn.Module, shards: Sharder) -> None:
        """Shard the loaded trained networks, which `denoiser` joins."""
        if all(p.requires_grad for p in denoiser.parameters()):
            self.empty = shards.copy_without_values(denoiser)
            self.frozen_copy = partial(shards.frozen_copy, denoiser, self.empty, self.blocks)
        shards.add_all(self.modules())

    def keep_blocks(self, share: float) -> None:
        """Let a share of the blocks keep their activations; call this before `load`."""
        self.setup = replace(self.setup, speed=replace(self.setup.speed, kept_blocks=share))

    @abstractmethod
    def modules(self) -> Sequence[tuple[nn.Module, Sequence[nn.Module]]]:
        """Return the loaded trained networks, each with its `blocks`."""

    @abstractmethod
    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """Return the repeated blocks of a trained network, or of a copy of one."""

    @abstractmethod
    def set_attention(self, name: Attention) -> None:
        """Let the trained networks, copies, and later loaded ones use an attention backend."""

    @abstractmethod
    def divide_context(self, mesh: DeviceMesh, meet: Callable[[str], None]) -> None:
        """Evaluate the loaded networks in context parallel with the other processes of a mesh.

        The mesh has the dimensions `ring`, of size 1, and `ulysses`. `meet` is called before each
        evaluation with a description of it. Afterwards each process holds a partial gradient.
        """

    @abstractmethod
    def reduce_precision(self, precision: Reduced) -> AbstractContextManager[None]:
        """Compute velocities in a lower precision inside the context; weights do not change."""

    @abstractmethod
    def digest_files(self) -> str:
        """Return a digest of the untrained networks' files; empty for networks of a script."""

    @property
    @abstractmethod
    def left_out(self) -> list[str]:
        """Return the components of the base model that a merged pipeline does not have."""

    @abstractmethod
    def check_export(self, folder: str, target: ExportTarget) -> None:
        """Raise ValueError if saved weights in `folder` cannot be exported; reads no weights."""

    @abstractmethod
    def export(
        self, policy: Policy, out: str, target: ExportTarget, dtype: ExportDtype
    ) -> float | None:
        """Write the weights of the loaded policy, which cannot be used afterwards.

        Returns the largest difference that the public loader finds; None if it is not installed.
        """


class PromptCache(ABC):
    """Cache of the conditioning of requests, so that encoders need not stay in memory."""

    @abstractmethod
    def conditioning(self, policy: Policy, requests: Sequence[Request]) -> Cond:
        """Return the result of `policy.encode`, on its device; encode only missing requests."""


class PromptEncoder(ABC):
    """Prompt encoders of a policy, which are loaded and freed separately from the rest of it."""

    cache: PromptCache | None = None
    """Cache of conditioning. With one, `load` reads no prompt encoders; None: it reads them."""
    micro_batch: int | None = None
    """Number of prompts that are encoded together; None: all that a caller passes."""

    @abstractmethod
    def digest_files(self) -> str:
        """Return a digest of the files that `encode` depends on; reads no weights into memory."""

    @abstractmethod
    def describe_settings(self, policy: Policy) -> str:
        """Return the settings of a policy that `encode` may depend on, as one string."""

    @abstractmethod
    def read(self, device: torch.device) -> None:
        """Move the prompt encoders to a device; read their weights first if necessary."""

    @abstractmethod
    def free(self) -> None:
        """Drop the prompt encoders from memory."""

    @abstractmethod
    def probe_requests(self) -> Sequence[Request]:
        """Return the requests that are encoded to verify saved weights."""


class UserConditioning(ABC):
    """Conditioning of a policy on users."""

    @abstractmethod
    def add_users(self, cond: Cond, users: Sequence[str]) -> Cond:
        """Return `cond` conditioned on `users`, one per row; "" is an unknown user."""

    @abstractmethod
    def check_user(self, user: str) -> None:
        """Raise ValueError for a user that the policy does not know; needs no weights."""
