"""Define the trainable parts of rewards: fitted weights, heads and their backbones."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn

from flowalign.functional.rating import Features
from flowalign.types.policy import Policy
from flowalign.types.request import MediaBatch
from flowalign.types.reward import Loadable
from flowalign.types.trajectory import Cond
from flowalign.utils.ranges import Component


@dataclass(frozen=True)
class Fit:
    """Result of fitting the weights of a reward."""

    text: str
    """Content of the weights file that the reward reads."""
    figures: Mapping[str, float]
    """Figures to report, by name: accuracies and counts."""


class Fittable(ABC):
    """Reward with weights that can be fitted to human comparisons of scored samples."""

    @property
    @abstractmethod
    def fitted_dims(self) -> Sequence[str]:
        """Return the F weighted dimensions of the reward; raise ValueError if there are none."""

    @abstractmethod
    def fit(
        self,
        lead: Float[Tensor, "n F"],
        share: Float[Tensor, "n"],
        ridge: float = 0.0,
        held_out: float = 0.2,
        seed: int = 0,
    ) -> Fit:
        """Fit weights to n compared pairs, in the dimensions `fitted_dims`.

        `lead` is the score of the first sample minus the score of the second. `share` is the
        probability that annotators prefer the first. The fraction `held_out` of the pairs, drawn
        with `seed`, is only evaluated.

        Raises:
            ValueError: The pairs do not determine the weights.
        """


class Refreshable(ABC):
    """`RewardModel` with a head that a run can train further between its steps."""

    @abstractmethod
    def head(self) -> Mapping[str, nn.Parameter]:
        """Return the parameters of the head by name; the model must be loaded."""

    @abstractmethod
    def features(self, batch: MediaBatch) -> Features:
        """Return the inputs of the head for each sample, without gradient."""

    @abstractmethod
    def score_features(self, features: Features) -> Float[Tensor, "n R"]:
        """Return the scores of samples from their features, with a gradient to the head."""


class Backbone(Loadable):
    """Network that turns media and prompts into features for a trained head."""

    network: nn.Module
    """Network, in main memory after `load`; its owner moves it to a device. Parameters that require
    a gradient are an adapter, which is trained and saved together with the head. The rest is
    frozen."""
    fingerprint: str
    """Hash of the frozen weights and all settings, known after `load`; equal fingerprints mean
    equal features."""
    reads_prompts: bool
    """Whether the features depend on the prompts."""
    reads_references: bool = False
    """Whether the features depend on the source images of edits; then every sample needs one."""
    num_frames: int | None
    """Number of evenly spaced frames that are read from longer videos; None: all."""

    @abstractmethod
    def embed(self, batch: MediaBatch) -> Features:
        """Return the features of each sample, independent of the batch, on the network's device."""


class HeadNetwork(nn.Module, ABC):
    """Torch module of a `Head`, which maps standardised `Features` to `Ratings`."""

    @abstractmethod
    def linear_layer(self) -> tuple[nn.Linear, Sequence[int]] | None:
        """Return the layer that ridge regression can fit, with the dimension of each output row.

        The layer is linear in the joint features. Returns None if there is no such layer.
        """


class Head(Component, ABC):
    """Settings of the network between features and scores, which is built once sizes are known."""

    @abstractmethod
    def build(self, joint: int, prompt: int, dims: Sequence[str]) -> HeadNetwork:
        """Build a network from torch's random state; raise ValueError if the sizes do not fit."""


class LatentReward(ABC):
    """Reward of a policy's noisy latents, which needs neither completion nor decoding.

    Implementation: `reward_models.wrappers.trained`. The constructor is cheap and sets the fields
    that a plan needs.
    """

    dims: tuple[str, ...]
    """Names of the L columns; higher is better in each."""
    evaluation_share: float
    """Cost of one score as a share of a denoiser evaluation, in (0, 1]."""

    @abstractmethod
    def attach(self, policy: Policy) -> None:
        """Read the weights. The policy must be loaded; a second call does nothing.

        Raises:
            ValueError: The policy's blocks differ from the blocks that the reward was trained on.
        """

    @abstractmethod
    def score(
        self, x: Float[Tensor, "n *latent"], sigma: Float[Tensor, "*n"], cond: Cond
    ) -> Float[Tensor, "n L"]:
        """Score states at one noise level, or one level per row; differentiable in the states.

        Adapters are ignored: the score uses the policy's base weights. Call `attach` first.
        """


class NoisyBackbone(Backbone):
    """Backbone that turns noisy latents into features, for a head that rates every noise level.

    `embed` returns clean latents as `joint` and the conditioning as `prompt`; both may be cached.
    `add_noise` turns them into features.
    """

    policy: Policy
    """Model of the latents, loaded by `load`."""
    evaluation_share: float
    """Cost of the features as a share of a denoiser evaluation, known after `load`."""
    weights_fingerprint: str
    """Hash of the denoiser weights that the features depend on, known after `load`."""

    @abstractmethod
    def add_noise(
        self, clean: Features, sigma: Float[Tensor, "n"], noise: Float[Tensor, "n D"]
    ) -> Features:
        """Return the features of (1 - sigma) * latents + sigma * noise, both flattened."""
