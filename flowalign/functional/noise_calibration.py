"""Calibrate the noise of each denoising step: initial levels, signs of gains, update rules.

Source: DenseGRPO, arXiv:2601.20218v2, Alg. 1.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.functional.transition import NOISE


class Signs(NamedTuple):
    """Counts the samples that gained, that lost and that did neither, at each step."""

    positive: Int[Tensor, "T"]
    negative: Int[Tensor, "T"]
    ties: Int[Tensor, "T"]

    @property
    def valid(self) -> Int[Tensor, "T"]:
        """Return the number of samples whose gain is known."""
        return self.positive + self.negative + self.ties


def initial_levels(sigmas: Float[Tensor, "S"], scale: float) -> Float[Tensor, "S-1"]:
    """Return psi_k = scale sqrt(sigma / (1 - sigma)), with 1 - sigma_1 for 1 - sigma_0 = 0.

    The result is in float64. `DanceSDE` with eta = psi_k is then `FlowSDE` with eta = scale.

    Source: Flow-GRPO, arXiv:2505.05470v5, as in `FlowSDE`.
    """
    sigma = sigmas[:-1].double()
    below = torch.where(sigma > NOISE, sigmas[1].double(), sigma)
    return scale * (sigma / (1 - below)).sqrt()


def count_signs(gains: Float[Tensor, "N T"]) -> Signs:
    """Count the signs of the gains per step; gains that are not finite are left out."""
    known = gains.isfinite()
    return Signs(*((known & side).sum(0) for side in (gains > 0, gains < 0, gains == 0)))


def paper_rule(
    psi: Float[Tensor, "T"],
    num_positive: Int[Tensor, "T"],
    num_negative: Int[Tensor, "T"],
    *,
    threshold: float,
    step: float,
    floor: float,
) -> Float[Tensor, "T"]:
    """Return psi + step where |num_positive - num_negative| < threshold, else psi - step; >= floor.

    The rule has no convergence test: past the boundary it goes back, so it oscillates by step
    around it. threshold is a count, and the difference of balanced counts fluctuates by sqrt(N), N
    being the number of samples that are no ties: unless threshold exceeds about 0.67 sqrt(N),
    balanced steps are lowered more often than raised, and psi drifts to the floor wherever the
    boundary lies. With threshold 2 that is so for N = 4, 6 and from 8 on. A surplus of positive
    gains lowers psi as one of negative gains does. Ties count on neither side, so a step with only
    ties is raised. The floor is ours: the paper has none.

    Source: DenseGRPO, arXiv:2601.20218v2, Alg. 1; threshold 2, step 0.01; N is not given.
    """
    balanced = (num_positive - num_negative).abs() < threshold
    return torch.where(balanced, psi + step, psi - step).clamp(min=floor)


def damped_rule(
    psi: Float[Tensor, "T"],
    num_positive: Int[Tensor, "T"],
    num_negative: Int[Tensor, "T"],
    *,
    iteration: int,
    tolerance: float,
    step: float,
    floor: float,
    halving: float = 10.0,
) -> Float[Tensor, "T"]:
    """Return psi exp(rate (tolerance + imbalance)), at least floor.

    rate = step / (1 + iteration / halving), and
    imbalance = (num_positive - num_negative) / (num_positive + num_negative) is in [-1, 1] and an
    unbiased estimate of 2 p - 1, p = P(gain > 0 | no tie). The fixed point is therefore p = (1 -
    tolerance) / 2 for every N; N only sets the noise, and the falling rate (Robbins-Monro) averages
    it out. A threshold on z = imbalance sqrt(N) would move the fixed point with N. Where p falls
    with psi the fixed point is unique and reached from both sides. p tends to 1/2 as psi tends to
    0, so tolerance 0 would lead there. Unlike `paper_rule` this rule is signed: noise that helps
    more often than it harms is raised, and so is a step with only ties.

    Levels span orders of magnitude, hence relative changes: from a level far too high psi falls by
    exp(-(1 - tolerance) rate) per iteration, from one far too low it rises by exp(tolerance rate)
    only, so start high.

    The rule is ours; it replaces that of DenseGRPO, arXiv:2601.20218v2, Alg. 1.
    """
    decided = (num_positive + num_negative).clamp(min=1)
    imbalance = (num_positive - num_negative) / decided.to(psi.dtype)
    rate = step / (1 + iteration / halving)
    return (psi * (rate * (tolerance + imbalance)).exp()).clamp(min=floor)
