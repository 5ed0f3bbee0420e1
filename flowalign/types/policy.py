"""The interface of a model: what a loss, a rollout and a plan ask of a policy."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from flowalign.types.trajectory import Cond


@dataclass(frozen=True)
class Saving:
    """One setting of a policy that lowers one part of its memory."""

    part: Literal["activations", "decoding", "text encoders"]
    setting: str
    """Key and value as a run file has them: "policy.gradient_checkpointing: true"."""
    saved_bytes: int
    """Per sample where the part is counted per sample."""


@dataclass(frozen=True)
class ModelPlan:
    """What is known of a policy before its weights are read."""

    latent_shape: tuple[int, ...]
    parameters: int
    trainable: int
    bytes_per_parameter: int
    activation_bytes: int
    """Kept for the backward pass, per sample of a micro-batch; a rough estimate."""
    sigmas: Callable[[int], Float[Tensor, "S"]]
    """Number of steps to the schedule."""
    decode_bytes: int = 0
    """Held at the peak of decoding, per sample that is decoded with others; a rough estimate."""
    decodes_together: bool = True
    """Whether a micro-batch is decoded at once, and not one sample after another."""
    text_bytes: int = 0
    """Weights of text encoders that stay on the device, and of the VAE where it is known."""
    offloaded_bytes: int = 0
    """Weights of text encoders that wait in main memory."""
    networks: int = 1
    """Of equal size among the parameters, such as experts; saved and verified one at a time."""
    savings: Sequence[Saving] = ()
    """What the policy could be told to need less; none for what it already does."""


class VelocityField(ABC):
    """What a loss needs of a policy, and all there is to a frozen reference."""

    @abstractmethod
    def velocity(
        self, x: Float[Tensor, "n *latent"], sigma: Float[Tensor, "*n"], cond: Cond
    ) -> Float[Tensor, "n *latent"]:
        """dx / dsigma, guidance included, in float32; one time for all rows, or one for each."""


class Policy(VelocityField):
    """A flow model with its text encoder and decoder. Implementations live in `pipelines/`."""

    denoiser: nn.Module
    """The network being trained; the rest of the pipeline is frozen."""
    evaluations_per_velocity: int
    """Network evaluations that one call of `velocity` costs per sample: 2 with guidance."""

    guidance: float = 1.0
    """Classifier-free guidance of `velocity`; at 1 there is none."""

    fps: float | None = None
    """Frames per second of what `decode` gives; None for pictures."""

    num_frames: int | None = None
    """Of what `decode` gives, and what `embed` needs; None for pictures."""

    precision: Literal["fp32", "bf16", "fp16"]
    """What the network computes in; states, sigmas and log-probabilities are float32 regardless."""

    @abstractmethod
    def plan(self) -> ModelPlan:
        """Sizes, from configuration files alone. ValueError for a model that cannot be used."""

    @abstractmethod
    def load(self, device: torch.device) -> None:
        """Read the weights. Constructors are cheap; everything below needs this first."""

    @abstractmethod
    def encode(self, prompts: Sequence[str]) -> Cond:
        """Text conditioning, one row per prompt."""

    @abstractmethod
    def schedule(self, num_steps: int) -> Float[Tensor, "S"]:
        """Decreasing sigmas of the model's own sampler, to 0 from 1, or from below where the model
        was never trained on pure noise."""

    @abstractmethod
    def noise(self, num_samples: int, generator: torch.Generator) -> Float[Tensor, "n *latent"]:
        """Initial states, drawn on the CPU so that a seed means the same on every machine."""

    @abstractmethod
    def decode(self, x: Float[Tensor, "n *latent"]) -> Float[Tensor, "n F 3 H W"]:
        """Clean latents to media in [0, 1]."""

    @abstractmethod
    def embed(self, media: Float[Tensor, "n F 3 h w"]) -> Float[Tensor, "n *latent"]:
        """Media in [0, 1] to clean latents, the mode of the encoder; resized so that they cover the
        policy's own size, and cropped to it from the centre."""

    @abstractmethod
    def encoders(self) -> tuple[str, str]:
        """What identifies the encoder of media and that of text: equal ones encode alike."""

    @abstractmethod
    def save_weights(self, folder: str) -> None:
        """Write the trained weights in the form that the model's own pipeline loads."""

    @abstractmethod
    def load_weights(self, folder: str) -> None:
        """Read what `save_weights` wrote. Raises ValueError for weights of another model."""

    @abstractmethod
    def verify_weights(self, folder: str) -> float:
        """Largest difference between this policy and a fresh pipeline that loads `folder`."""


class Personal(ABC):
    """A policy that answers to users, beside being a `Policy`."""

    @abstractmethod
    def with_users(self, cond: Cond, users: Sequence[str]) -> Cond:
        """The conditions, asked by these users, one per row; "" is no one in particular."""
