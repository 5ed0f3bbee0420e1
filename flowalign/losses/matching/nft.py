"""Contrast an implicit positive and an implicit negative policy (DiffusionNFT).

Source: DiffusionNFT, arXiv:2509.16117, and code of NVlabs/DiffusionNFT.
"""

from dataclasses import dataclass

from typing_extensions import override

from flowalign.functional.advantage import nft_of_places
from flowalign.functional.forward_process import nft, optimality
from flowalign.functional.noise_matching import sample_error
from flowalign.types import ALONE, Batch, LossContext, MatchingLoss
from flowalign.types.losses import Loss
from flowalign.types.ranges import PositiveFloat


@dataclass(frozen=True, kw_only=True)
class NFT(MatchingLoss):
    """Mean of weight * advantage_max * nft over rows, with samples of the old policy.

    The paper samples without guidance, updates the old policy once per training step, and adds
    `recipe.kl` 1e-4.
    """

    paired, velocity, uses_places = False, True, True
    reads = frozenset({"advantage", "old"})
    beta: PositiveFloat = 1.0
    """Distance of the implicit policies from the old one, in units of the policy's distance.
    Published: 1, and 0.1 for text rendering and for several rewards."""
    advantage_max: PositiveFloat = 5.0
    """Advantage above which a sample counts as optimal; also the scale of the loss."""

    @override
    def loss(self, batch: Batch, context: LossContext = ALONE) -> Loss:
        optimal = optimality(batch["advantage"], self.advantage_max)
        old, sigma = batch["old"], batch["sigma"]
        each = nft(batch["policy"], old, sigma, optimal, self.beta)
        if "places" in batch:
            local = optimality(batch["places"], self.advantage_max)
            each = nft_of_places(batch["policy"], old, sigma, local, self.beta)
        error = sample_error(batch["policy"].detach()).mean()
        stats = {"error": error, "optimality": optimal.mean()}
        return self.mean(batch, self.advantage_max * each, stats)
