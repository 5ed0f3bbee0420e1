"""Guide samplers to the prompt and to the conditioned prompt apart: Parrot's guidance."""

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from flowalign.types import (
    Cond,
    ConditionedPrompt,
    Policy,
    PromptGuidance,
    Request,
    VelocityField,
    encode_requests,
)


class PromptGuidedField(VelocityField):
    """Adds up velocities of a policy under the prompt, the conditioned prompt and the empty one.

    See `PromptGuidance`. The conditioning of each branch stands under its name.
    """

    def __init__(self, policy: Policy, guidance: PromptGuidance):
        self.policy = without_guidance(policy)
        weights = {"original": guidance.original, "conditioned": guidance.conditioned}
        weights["empty"] = 1 - guidance.original - guidance.conditioned
        self.weights = {branch: weight for branch, weight in weights.items() if weight}

    def encode(self, requests: Sequence[Request]) -> Cond:
        """Return the conditioning on requests in all branches that have a weight."""
        requests_of = {
            "original": [
                replace(r, conditioned=ConditionedPrompt(r.prompt, r.user)) for r in requests
            ],
            "conditioned": requests,
            "empty": [replace(r, conditioned=ConditionedPrompt("")) for r in requests],
        }
        return {
            f"{branch}/{name}": value
            for branch in self.weights
            for name, value in encode_requests(self.policy, requests_of[branch]).items()
        }

    @override
    @torch.no_grad()
    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return the weighted sum, which takes a network evaluation for each branch."""
        total = torch.zeros_like(x, dtype=torch.float32)
        for branch, weight in self.weights.items():
            branch_cond = {
                name.removeprefix(f"{branch}/"): value
                for name, value in cond.items()
                if name.startswith(f"{branch}/")
            }
            total = total + weight * self.policy.velocity(x, sigma, branch_cond)
        return total


def without_guidance(policy: Policy) -> Policy:
    """Return the same weights without classifier-free guidance; the policy if it has none."""
    if policy.evaluations_per_velocity == 1:
        return policy
    # A shallow copy: it shares the networks, and only these two attributes differ.
    plain = copy.copy(policy)
    plain.guidance, plain.evaluations_per_velocity = 1.0, 1
    return plain
