"""Contrast an implicit positive and an implicit negative policy (DiffusionNFT).

Source: DiffusionNFT, arXiv:2509.16117, and code of NVlabs/DiffusionNFT.
"""

from dataclasses import dataclass, replace

from typing_extensions import override

from flowalign.functional.forward_process import nft, optimality
from flowalign.functional.noise_matching import sample_error
from flowalign.functional.places import nft_of_places
from flowalign.types import ALONE, Examples, LossContext, MatchingLoss, Requirements, Residuals
from flowalign.types.loss import Loss
from flowalign.types.ranges import PositiveFloat

OLD_POLICY = Requirements(reference=False, old=True, paired=False, velocity=True)
"""Requirements of losses that compare the policy with the old one, and need no reference."""


@dataclass(frozen=True, kw_only=True)
class NFT(MatchingLoss):
    """Mean of weight * advantage_max * nft over rows, with samples of the old policy.

    The paper samples without guidance, updates the old policy once per training step, and adds
    `recipe.kl` 1e-4.
    """

    beta: PositiveFloat = 1.0
    """Distance of the implicit policies from the old one, in units of the policy's distance.
    Published: 1, and 0.1 for text rendering and for several rewards."""
    advantage_max: PositiveFloat = 5.0
    """Advantage above which a sample counts as optimal; also the scale of the loss."""

    @property
    @override
    def requirements(self) -> Requirements:
        """Require advantages and the old policy; the value depends on the errors."""
        return replace(OLD_POLICY, uses_places=True, requires={"advantages"})

    @override
    def loss(self, residuals: Residuals, batch: Examples, context: LossContext = ALONE) -> Loss:
        optimal = optimality(batch.required_advantage, self.advantage_max)
        old, sigma = residuals.required_old, residuals.required_sigma
        each = nft(residuals.policy, old, sigma, optimal, self.beta)
        if batch.places is not None:
            local = optimality(batch.places, self.advantage_max)
            each = nft_of_places(residuals.policy, old, sigma, local, self.beta)
        each = self.advantage_max * each
        loss = (batch.weight * each).mean()
        return loss, {
            "policy_loss": loss.detach(),
            "error": sample_error(residuals.policy.detach()).mean(),
            "optimality": optimal.mean(),
        }
