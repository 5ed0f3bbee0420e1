"""The vocabulary of flowalign: axes, values passed between stages, and plug-in interfaces.

Axes, used in every annotation of the package:

    P  prompts on this rank               G  samples per prompt (the group)
    B  = P * G samples, prompt-major, so sample b answers prompt b // G
    S  states of a trajectory, T = S - 1 transitions; transition k maps state k to state k + 1
    R  reward dimensions                  F  video frames, 1 for an image

Time is the flow-matching sigma: sigma_0 = 1 is noise, sigma_T = 0 is data, and
x_sigma = (1 - sigma) * data + sigma * noise, hence velocity v = dx / dsigma = noise - data.
`k` is always an index and `sigma` always a time.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from flowalign.functional.chunk import Chunk
from flowalign.functional.tail import Completion
from flowalign.functional.transition import Gaussian, Kernel, transition
from flowalign.reward_types import (
    Backbone,
    Head,
    HeadNetwork,
    Loadable,
    MediaBatch,
    RewardModel,
    RewardOutput,
    RewardSpec,
)
from flowalign.trajectory import Cond, Trajectory

__all__ = [
    "Backbone", "Cond", "CreditEstimator", "Head", "HeadNetwork", "Loadable", "MediaBatch",
    "Minibatch", "ModelPlan", "Personal", "Policy", "PolicyLoss", "RewardModel",
    "RewardOutput", "RewardSpec", "Saving", "StepCredit", "Trajectory", "Values", "VelocityField",
]  # fmt: skip


@dataclass(frozen=True)
class StepCredit:
    """What each transition earned, before any normalisation."""

    value: Float[Tensor, "B T R"]
    group: Int[Tensor, "B T"]
    """Transitions with equal ids are compared with each other."""
    mask: Bool[Tensor, "B T"]
    """True where a transition is trained."""
    normalised: bool = False
    """The values are advantages already; the recipe says so too, by advantage_scale given."""
    marked: Bool[Tensor, "B T"] | None = None
    """Transitions that the method singles out, such as turning points; for pictures only."""


@dataclass(frozen=True)
class Minibatch:
    """One transition k of n samples: everything a loss may look at."""

    k: int
    x: Float[Tensor, "n *latent"]
    x_next: Float[Tensor, "n *latent"]
    logp_old: Float[Tensor, "n"]
    advantage: Float[Tensor, "n"]
    weight: Float[Tensor, "n"]
    """Multiplies the policy term of each transition; 0 takes it out."""
    sigmas: Float[Tensor, "S"]
    eta: Float[Tensor, "n"]
    kernel: Kernel
    cond: Cond
    mean_old: Float[Tensor, "n *latent"] | None = None
    """Mean of the transition under the policy that sampled it, for losses that declare the need."""
    chunk: Chunk | None = None
    """The rest of each transition's chunk, for losses that declare chunks."""

    @property
    def required_mean_old(self) -> Float[Tensor, "n *latent"]:
        """mean_old, which the loop keeps for losses that declare `needs_mean_old`."""
        assert self.mean_old is not None, "the loss uses mean_old without declaring needs_mean_old"
        return self.mean_old

    @property
    def dt(self) -> Float[Tensor, ""]:
        """Length of the step, sigma_k - sigma_{k+1} > 0."""
        return self.sigmas[self.k] - self.sigmas[self.k + 1]

    def transition(self, field: "VelocityField") -> Gaussian:
        """pi(. | x_k) under the given velocity field."""
        velocity = field.velocity(self.x.float(), self.sigmas[self.k], self.cond)
        return transition(self.kernel, self.x.float(), velocity, self.sigmas, self.k, self.eta)


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


class Values(ABC):
    """The one oracle of credit methods, and all that costs them anything."""

    @abstractmethod
    def __call__(self, ks: Sequence[int], how: Completion | None = None) -> Float[Tensor, "B K R"]:
        """Rewards of states ks after finishing each by ODE; values([T]) is the outcome.

        NaN where a reward failed. `how` None: as the recipe's `completion` says.
        """


class CreditEstimator(ABC):
    """Turns state values into per-transition credit. Implementations: `flowalign/credit/`."""

    @abstractmethod
    def __call__(self, trajectory: Trajectory, values: Values) -> StepCredit:
        """Credit every transition of every sample."""


class PolicyLoss(ABC):
    """Turns one minibatch of transitions into a loss. Implementations: `flowalign/algorithms/`."""

    @property
    @abstractmethod
    def needs_reference(self) -> bool:
        """Whether `loss` evaluates the reference: one more network evaluation per transition."""

    @property
    @abstractmethod
    def needs_mean_old(self) -> bool:
        """Whether rollouts must keep the mean of each trained transition."""

    @property
    @abstractmethod
    def pairs(self) -> bool:
        """Whether a minibatch holds pairs: winners, then as many losers."""

    @property
    @abstractmethod
    def chunks(self) -> Sequence[int] | Literal["latent_change"] | None:
        """Numbers of steps whose ratios are taken together, from the first on; see `GRPO`."""

    @property
    @abstractmethod
    def clip(self) -> float:
        """Largest change of the ratio that passes; the replay check compares drift with it."""

    @abstractmethod
    def loss(
        self, policy: VelocityField, reference: VelocityField, batch: Minibatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss over the minibatch, and detached scalars for the log."""
