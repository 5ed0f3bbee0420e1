"""DiffusionNFT with an advantage and a normaliser for each modality (OmniNFT).

Source: OmniNFT, arXiv:2605.12480; code of zghhui/OmniNFT and verl-omni. The paper's text was not
read.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.forward_process import nft, optimality
from flowalign.functional.noise_matching import sample_error
from flowalign.types import ALONE, Batch, LossContext, MatchingLoss
from flowalign.types.losses import Loss
from flowalign.utils.ranges import NonNegativeFloat, PositiveFloat


def nft_of_modalities(
    policy: Float[Tensor, "n d"],
    old: Float[Tensor, "n d"],
    sigma: Float[Tensor, "n"],
    optimal: Float[Tensor, "n P"],
    beta: float,
    sizes: Sequence[int],
) -> Float[Tensor, "n"]:
    """Return the mean over parts of `nft`, each with its own probability and normaliser.

    `sizes` divides the flat residuals into parts, so a large part does not outweigh a small one.
    """
    parts = zip(policy.split([*sizes], 1), old.split([*sizes], 1), optimal.unbind(1), strict=True)
    return torch.stack([nft(v, v_old, sigma, r, beta) for v, v_old, r in parts]).mean(0)


@dataclass(frozen=True, kw_only=True)
class OmniNFT(MatchingLoss):
    """NFT of the parts of a state, such as video and audio, each with its own rewards.

    It needs `recipe.data.modalities`. A reward that is not routed to a part has no gradient in the
    velocity of this part. The gradient surgery of the paper is `audio_gradient` of
    `pipelines.LTX2`; its weights of regions are missing.
    """

    paired, velocity = False, True

    beta: PositiveFloat = 1.0
    """Distance of the implicit policies from the old one, in units of the policy's distance."""
    advantage_max: PositiveFloat = 5.0
    """Advantage above which a sample counts as optimal; also the scale of the loss."""
    kl: NonNegativeFloat = 1e-4
    """Weight of the squared difference from the reference's clean prediction, averaged over the
    elements of each part and then over parts. 0: the reference is not evaluated."""

    @property
    @override
    def needs(self) -> Set[str]:
        """Return advantages of modalities, the old policy and, for the KL, the reference."""
        return {"modality_advantage", "old", *({"reference"} if self.kl else ())}

    @override
    def loss(self, batch: Batch, context: LossContext = ALONE) -> Loss:
        advantage, parts = batch["modality_advantage"], context.modality_sizes
        optimal = torch.stack([advantage[part] for part in parts], 1)
        optimal = optimality(optimal, self.advantage_max)
        old, sigma, sizes = batch["old"], batch["sigma"], [*parts.values()]
        each = nft_of_modalities(batch["policy"], old, sigma, optimal, self.beta, sizes)
        loss = (batch["weight"] * self.advantage_max * each).mean()
        stats = {"policy_loss": loss.detach()}
        if self.kl:
            away = sigma[:, None] * (batch["policy"] - batch["reference"])
            parts = torch.stack([sample_error(part) for part in away.split(sizes, 1)])
            stats["kl"] = parts.mean().detach()
            loss = loss + self.kl * parts.mean()
        return loss, stats
