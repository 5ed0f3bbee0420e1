"""Guide samplers with separate scales for the plain and the conditioned prompt (Parrot)."""

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
    """Weighted sum of a policy's velocities for the plain, conditioned and empty prompts.

    See `PromptGuidance`. Conditioning keys are prefixed with the name of the branch.
    """

    def __init__(self, policy: Policy, guidance: PromptGuidance):
        self.policy = without_guidance(policy)
        weights = {"original": guidance.original, "conditioned": guidance.conditioned}
        weights["empty"] = 1 - guidance.original - guidance.conditioned
        self.weights = {branch: weight for branch, weight in weights.items() if weight}

    def encode(self, requests: Sequence[Request]) -> Cond:
        """Return the conditioning of requests in all branches with a nonzero weight."""
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
        """Return the weighted sum, with one network evaluation per branch."""
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
    """Return a view of the policy without classifier-free guidance."""
    if policy.evaluations_per_velocity == 1:
        return policy
    # The shallow copy shares the networks. Only two attributes differ.
    plain = copy.copy(policy)
    plain.guidance, plain.evaluations_per_velocity = 1.0, 1
    return plain
