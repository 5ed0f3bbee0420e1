"""Sample clean latents like the model's own pipeline, or with two prompt guidances (Parrot)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from flowalign.functional.transition import FlowSDE
from flowalign.sampling.reward_guidance import GuidedTransition, RewardGuidance, compute_pushes
from flowalign.sampling.stepping import evaluate_velocity
from flowalign.types import (
    Cond,
    ConditionedPrompt,
    Policy,
    PromptConditioning,
    PromptGuidance,
    Request,
    VelocityField,
    encode_requests,
    with_guidance,
)
from flowalign.utils.costs import stage


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
    return policy if policy.evaluations_per_velocity == 1 else with_guidance(policy, 1.0)


@stage("sample")
@torch.no_grad()
def generate(
    policy: Policy,
    requests: Sequence[Request],
    num_steps: int,
    generators: Sequence[torch.Generator],
    micro_batch: int,
    guidance: RewardGuidance | None = None,
    conditioning: PromptConditioning | None = None,
) -> Float[Tensor, "n *latent"]:
    """Return one clean latent per request, sampled deterministically.

    `guidance` shifts the steps along the gradient of a reward. `conditioning` adds the conditioning
    of inference to the requests.
    """
    x = torch.cat([policy.noise(1, generator) for generator in generators])
    field, cond, row = _condition_requests(policy, requests, conditioning)
    row = row.to(x.device)
    sigmas = policy.schedule(num_steps)
    for k in range(num_steps):
        v = evaluate_velocity(field, x, sigmas[k], cond, row, micro_batch)
        following = x + (sigmas[k + 1] - sigmas[k]) * v
        if guidance and guidance.active(sigmas, k):
            step = GuidedTransition(sigmas, k, FlowSDE(), x.new_zeros(len(x)))
            following = following + compute_pushes(
                guidance, policy, x, step, cond, row, micro_batch
            )
        x = following
    return x


def _condition_requests(
    policy: Policy, requests: Sequence[Request], conditioning: PromptConditioning | None
) -> tuple[VelocityField, Cond, Int[Tensor, "n"]]:
    """Return the velocity field, its conditioning, and each request's row in the conditioning."""
    if conditioning is None:
        return policy, *encode_once(policy, requests)
    conditioned = [conditioning.for_inference(request) for request in requests]
    if conditioning.guidance is None:
        return policy, *encode_once(policy, conditioned)
    guided = PromptGuidedField(policy, conditioning.guidance)
    return guided, *_encode_rows(guided.encode, conditioned)


def encode_once(policy: Policy, requests: Sequence[Request]) -> tuple[Cond, Int[Tensor, "n"]]:
    """Return the conditioning of the distinct requests, and the row of each given request."""
    return _encode_rows(partial(encode_requests, policy), requests)


def _encode_rows(
    encode: Callable[[Sequence[Request]], Cond], requests: Sequence[Request]
) -> tuple[Cond, Int[Tensor, "n"]]:
    """Encode distinct requests once with `encode`; return the same as `encode_once`."""
    by_digest = {request.input_digest: request for request in requests}
    # Sorting makes the text encoder's batch, and so its rounding, independent of the order.
    unique = sorted(by_digest.values(), key=lambda request: (request.prompt, request.input_digest))
    place = {request.input_digest: i for i, request in enumerate(unique)}
    return encode(unique), torch.tensor([place[request.input_digest] for request in requests])
