"""Measure how far a policy is from its reference, on samples that are noised again."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.functional.noise_matching import add_noise, sample_error
from flowalign.sampling.complete_states import evaluate_velocity
from flowalign.sampling.inference import encode_once
from flowalign.types import Policy, PromptConditioning, Request, VelocityField
from flowalign.utils.seeds import generator

LEVELS = 4
"""Number of noise levels of each sample."""


@torch.no_grad()
def measure_divergence(
    policy: Policy,
    reference: VelocityField,
    requests: Sequence[Request],
    latents: Float[Tensor, "n *latent"],
    indices: Sequence[int],
    seed: int,
    micro_batch: int,
    conditioning: PromptConditioning | None = None,
) -> Float[Tensor, "n"]:
    """Return the mean squared difference between the velocities of policy and reference.

    The KL divergence of the two flows is a weighted integral of it over noise levels. Every sample
    is noised to the levels (k + 0.5) / 4, because levels differ more than prompts do. The noises
    belong to the indices of samples in the evaluation. A sample costs eight evaluations.
    """
    if conditioning:
        requests = [conditioning.for_inference(request) for request in requests]
    cond, row = encode_once(policy, requests)
    row = row.to(latents.device)
    generators = [generator(seed, "divergence", i) for i in indices]
    errors = []
    for k in range(LEVELS):
        noise = torch.cat([policy.noise(1, own) for own in generators]).to(latents)
        sigma = latents.new_full((len(latents),), (k + 0.5) / LEVELS)
        x = add_noise(latents, noise, sigma)
        ours, theirs = (
            evaluate_velocity(field, x, sigma, cond, row, micro_batch)
            for field in (policy, reference)
        )
        errors.append(sample_error((ours - theirs).float()))
    return torch.stack(errors).mean(0).cpu()
