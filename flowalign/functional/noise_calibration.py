"""Calibrate the noise of each denoising step: initial levels, counts of signs, update rules.

Source: DenseGRPO, arXiv:2601.20218v2, Alg. 1.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.functional.transition import NOISE


class Signs(NamedTuple):
    """Numbers of samples with positive, negative and zero gain, at each step."""

    positive: Int[Tensor, "T"]
    negative: Int[Tensor, "T"]
    ties: Int[Tensor, "T"]

    @property
    def valid(self) -> Int[Tensor, "T"]:
        """Return the number of samples with a known gain."""
        return self.positive + self.negative + self.ties


def initial_levels(sigmas: Float[Tensor, "S"], scale: float) -> Float[Tensor, "S-1"]:
    """Return psi_k = scale sqrt(sigma / (1 - sigma)), with 1 - sigma_1 instead of 1 - sigma_0 = 0.

    The result is float64. `DanceSDE` with eta = psi_k then equals `FlowSDE` with eta = scale.

    Source: Flow-GRPO, arXiv:2505.05470v5, as in `FlowSDE`.
    """
    sigma = sigmas[:-1].double()
    below = torch.where(sigma > NOISE, sigmas[1].double(), sigma)
    return scale * (sigma / (1 - below)).sqrt()


def count_signs(gains: Float[Tensor, "N T"]) -> Signs:
    """Count the signs of the gains per step, ignoring non-finite gains."""
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
    """Return psi + step if |num_positive - num_negative| < threshold, else psi - step; >= floor.

    The rule has no convergence test, so psi oscillates by `step` around the boundary. `threshold`
    is a count, but the difference of balanced counts fluctuates by sqrt(N), where N is the number
    of samples except ties. Unless `threshold` exceeds about 0.67 sqrt(N), balanced steps are
    lowered more often than raised, and psi drifts to the floor. For threshold 2 this happens for
    N = 4, N = 6 and N >= 8. A surplus of positive gains lowers psi like a surplus of negative
    gains. A step with only ties is raised.

    Source: DenseGRPO, arXiv:2601.20218v2, Alg. 1, with threshold 2 and step 0.01; the paper does
    not state N. The floor is our addition.
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

    Here rate = step / (1 + iteration / halving), and
    imbalance = (num_positive - num_negative) / (num_positive + num_negative) is an unbiased
    estimate of 2 p - 1 in [-1, 1], with p = P(gain > 0 | no tie). The fixed point is therefore
    p = (1 - tolerance) / 2 for every N. N only affects the noise, which the falling rate averages
    out (Robbins-Monro). A threshold on z = imbalance sqrt(N) would move the fixed point with N. If
    p falls with psi, the fixed point is unique and is reached from both sides. p tends to 1/2 as
    psi tends to 0, so tolerance 0 would lead to psi = 0. Unlike `paper_rule`, this rule is signed:
    it raises noise that helps more often than it harms, and also a step with only ties.

    Changes are relative, because levels span orders of magnitude. A level far too high falls by
    exp(-(1 - tolerance) rate) per iteration. A level far too low only rises by exp(tolerance rate),
    so start high.

    The rule is our choice; it replaces the rule of DenseGRPO, arXiv:2601.20218v2, Alg. 1.
    """
    decided = (num_positive + num_negative).clamp(min=1)
    imbalance = (num_positive - num_negative) / decided.to(psi.dtype)
    rate = step / (1 + iteration / halving)
    return (psi * (rate * (tolerance + imbalance)).exp()).clamp(min=floor)
