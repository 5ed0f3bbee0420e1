"""Guide samplers to the prompt and to the dressed prompt apart: Parrot's guidance."""

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from flowalign.types import (
    Cond,
    Dress,
    Policy,
    PromptGuidance,
    Request,
    VelocityField,
    conditioning,
)


class PromptGuided(VelocityField):
    """Adds up the velocities of a policy under the prompt, the dressed prompt and the empty one.

    See `PromptGuidance`. The conditioning of each branch stands under its name.
    """

    def __init__(self, policy: Policy, guidance: PromptGuidance):
        self.policy = without_guidance(policy)
        weights = {"original": guidance.original, "dressed": guidance.dressed}
        weights["empty"] = 1 - guidance.original - guidance.dressed
        self.weights = {branch: weight for branch, weight in weights.items() if weight}

    def encode(self, requests: Sequence[Request]) -> Cond:
        """Return the conditioning on requests in all branches that have a weight."""
        asked = {
            "original": [replace(r, dress=Dress(r.prompt, r.user)) for r in requests],
            "dressed": requests,
            "empty": [replace(r, dress=Dress("")) for r in requests],
        }
        return {
            f"{branch}/{name}": value
            for branch in self.weights
            for name, value in conditioning(self.policy, asked[branch]).items()
        }

    @override
    @torch.no_grad()
    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return the weighted sum, which takes a network evaluation for each branch."""
        total = torch.zeros_like(x, dtype=torch.float32)
        for branch, weight in self.weights.items():
            told = {
                name.removeprefix(f"{branch}/"): value
                for name, value in cond.items()
                if name.startswith(f"{branch}/")
            }
            total = total + weight * self.policy.velocity(x, sigma, told)
        return total


def without_guidance(policy: Policy) -> Policy:
    """Return the same weights without classifier-free guidance; the policy if it has none."""
    if policy.evaluations_per_velocity == 1:
        return policy
    plain = copy.copy(policy)
    plain.guidance, plain.evaluations_per_velocity = 1.0, 1
    return plain
