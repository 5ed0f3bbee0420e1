"""Use the softmax over a group's matching errors as the policy, with a clipped ratio (KVPO).

Source: KVPO, arXiv:2605.14278, and its code. In the paper a group consists of branches of an
autoregressive video model. Here it consists of the samples of a request, so we share only the form
of the policy with the paper.
"""

from dataclasses import dataclass
from typing import Annotated

from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.forward_process import group_log_softmax
from flowalign.functional.noise_matching import sample_error
from flowalign.functional.transition import per_row
from flowalign.losses.matching.groups import GroupAdvantageLoss, require_groups_here
from flowalign.types import Batch
from flowalign.types.losses import ALONE, Loss, LossContext
from flowalign.utils.ranges import NonNegativeFloat, PositiveFloat, Range


@dataclass(frozen=True, kw_only=True)
class KVPO(GroupAdvantageLoss):
    """Mean of -weight * min(r A, clip(r) A) over rows, r = pi / pi_old, plus G kl KL(pi, pi_ref).

    pi is the softmax of -scale * l over a group of G, with l the error of x0. It is the relative
    likelihood of each sample of the group. The divergence of a group is split among its rows.
    """

    paired, velocity, shared_noise = False, True, True

    scale: PositiveFloat = 0.5
    """Factor on the errors of x0."""
    clip_low: Annotated[float, Range(above=0, most=1)] = 0.1
    """Distance of the smallest ratio from 1."""
    clip_high: PositiveFloat = 0.2
    """Distance of the largest ratio from 1."""
    kl: NonNegativeFloat = 0.0
    """Weight of the divergence from the reference's softmax. 0: none. The released code uses 10,
    with reference weights that we could not determine."""

    @override
    def loss(self, batch: Batch, context: LossContext = ALONE) -> Loss:
        """Return the mean loss over rows, and scalars.

        Raises:
            ValueError: A group has rows on other processes.
        """
        same = require_groups_here(batch, context, type(self).__name__)
        sigma, advantage = batch["sigma"], batch["advantage"]
        log_pi = self._log_policy(batch["policy"], sigma, same)
        ratio = (log_pi - self._log_policy(batch["old"], sigma, same)).exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        each = -(ratio * advantage).minimum(clipped * advantage)
        stats = {
            "error": sample_error(batch["policy"].detach()).mean(),
            "ratio": ratio.detach().mean(),
            "clip_fraction": (clipped * advantage < ratio * advantage).float().mean(),
        }
        if self.kl:
            log_ref = self._log_policy(batch["reference"], sigma, same)
            divergence = same.sum(1) * log_pi.exp() * (log_pi - log_ref)
            each = each + self.kl * divergence
            stats["group_kl"] = divergence.detach().mean()
        return self.mean(batch, each, stats)

    def _log_policy(
        self,
        residual: Float[Tensor, "n *latent"],
        sigma: Float[Tensor, "n"],
        same: Bool[Tensor, "n n"],
    ) -> Float[Tensor, "n"]:
        error = sample_error(per_row(sigma, residual) * residual)
        return group_log_softmax(-self.scale * error, same)
