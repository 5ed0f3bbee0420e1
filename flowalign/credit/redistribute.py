"""Redistributed credit: the outcome, spread over the steps by a rule that needs no value.

Source: "sigma" is SuperFlow, arXiv:2512.17951v2, advantage_k proportional to sigma_k, known from
secondary sources: our reconstruction, without its baseline and group sizes. "dt" is ours. CoCA,
arXiv:2505.19196v1, spreads by the similarity of intermediate and final latents, which is not here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.credit.chain import step_credit, stochastic_steps
from flowalign.types import CreditEstimator, StepCredit, Trajectory, ValueFn

Share = Literal["uniform", "sigma", "dt"]


def step_shares(
    kind: Share, sigmas: Float[Tensor, "S"], steps: Sequence[int]
) -> Float[Tensor, "n"]:
    """Share of each given step k: 1, sigma_k or sigma_k - sigma_{k+1}, scaled to mean 1."""
    share = {
        "uniform": torch.ones_like(sigmas[:-1]),
        "sigma": sigmas[:-1],
        "dt": sigmas[:-1] - sigmas[1:],
    }[kind][list(steps)]
    return share / share.mean()


@dataclass(frozen=True)
class Redistribute(CreditEstimator):
    """Each stochastic step earns its share of the outcome.

    Needs advantage_scale batch or none: dividing by the spread of a step's own group divides the
    share out again, and joint also compares shares of different steps.
    """

    share: Share = "sigma"

    def __call__(self, trajectory: Trajectory, values: ValueFn) -> StepCredit:
        """Value the outcome alone."""
        steps = stochastic_steps(trajectory)
        share = step_shares(self.share, trajectory.sigmas.cpu(), steps)
        final = values([trajectory.num_steps])
        return step_credit(trajectory, steps, share[:, None] * final)
