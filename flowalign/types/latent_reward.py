"""Define rewards of noisy latents: networks on the denoiser's own first blocks."""

from abc import ABC, abstractmethod

from jaxtyping import Float
from torch import Tensor

from flowalign.functional.rating import Features
from flowalign.types.policy import Policy
from flowalign.types.reward_heads import Backbone
from flowalign.types.trajectory import Cond


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
