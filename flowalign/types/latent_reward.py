"""Define rewards of noisy latents: networks on the denoiser's own first blocks."""

from abc import ABC, abstractmethod

from jaxtyping import Float
from torch import Tensor

from flowalign.functional.rating import Features
from flowalign.types.policy import Policy
from flowalign.types.reward_heads import Backbone
from flowalign.types.trajectory import Cond


class LatentReward(ABC):
    """Scores noisy latents of a policy, with neither completion nor decoding.

    Implementation: `reward_models.wrappers.latent`. The constructor is cheap, and says what a plan
    needs.
    """

    dims: tuple[str, ...]
    """Names of the L columns; higher is better in each."""
    evaluation_share: float
    """Share of an evaluation of the denoiser, in (0, 1], that the score of a state costs."""

    @abstractmethod
    def attach(self, policy: Policy) -> None:
        """Read the weights, for a policy whose own are loaded; a second call does nothing.

        Raises:
            ValueError: The reward was trained on other blocks than the policy has.
        """

    @abstractmethod
    def score(
        self, x: Float[Tensor, "n *latent"], sigma: Float[Tensor, "*n"], cond: Cond
    ) -> Float[Tensor, "n L"]:
        """Score states at one noise level, or one per row, with a gradient to those that need one.

        It scores by the policy's own weights, whatever adapters have learned. Call `attach` first.
        """


class NoisyBackbone(Backbone):
    """Turns noised latents into features, for a head that rates them at every noise level.

    What `embed` returns is not noised yet: clean latents as `joint`, and the conditioning as
    `prompt`. They may be cached; `add_noise` makes features of them.
    """

    policy: Policy
    """Model whose latents are rated, loaded by `load`."""
    evaluation_share: float
    """Share of an evaluation of the denoiser that features cost, known after `load`."""
    weights_fingerprint: str
    """Hash of the weights of the denoiser that features depend on, known after `load`."""

    @abstractmethod
    def add_noise(
        self, clean: Features, sigma: Float[Tensor, "n"], noise: Float[Tensor, "n D"]
    ) -> Features:
        """Return the features of (1 - sigma) latents + sigma noise, both flattened."""
