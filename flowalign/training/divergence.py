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

LEVELS = 8
"""Number of noise levels."""


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

    The KL divergence of the two flows is a weighted integral of it over noise levels. The sample
    with index i in the evaluation is noised to the level (i mod 8 + 0.5) / 8, so that a mean over
    samples covers all levels. A sample costs two evaluations.
    """
    if conditioning:
        requests = [conditioning.for_inference(request) for request in requests]
    cond, row = encode_once(policy, requests)
    levels = (torch.tensor(indices) % LEVELS + 0.5) / LEVELS
    noise = torch.cat([policy.noise(1, generator(seed, "divergence", i)) for i in indices])
    sigma, row = levels.to(latents), row.to(latents.device)
    x = add_noise(latents, noise.to(latents), sigma)
    ours, theirs = (
        evaluate_velocity(field, x, sigma, cond, row, micro_batch) for field in (policy, reference)
    )
    return sample_error((ours - theirs).float()).cpu()
