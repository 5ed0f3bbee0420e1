"""Optimise latents by score distillation with reward-weighted noises (RewardSDS)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.functional.noise_matching import add_noise
from flowalign.functional.reward_ascent import (
    FEWEST_NOISES,
    NoiseWeighting,
    distillation_gradient,
    noise_weights,
)
from flowalign.functional.transition import per_row
from flowalign.sampling.inference import encode_once
from flowalign.sampling.stepping import evaluate_velocity
from flowalign.types import Cond, Policy, Request, VelocityField
from flowalign.utils.ranges import PositiveFloat, PositiveInt, UnitInterval, require_ranges

Score = Callable[[Float[Tensor, "m *latent"], Sequence[Request]], Float[Tensor, "m"]]
"""Function that returns the reward of clean latents."""


@dataclass(frozen=True, kw_only=True)
class RewardSDS:
    """Settings of the optimisation of latents.

    Each update noises several copies of a latent to the same level, completes and scores them, and
    weights their score distillation gradients by the rewards.

    Completions and gradients both use the policy's guidance scale. The released code uses 7.5 for
    completions and 100 for gradients. Noise levels are uniform in sigma here, and uniform in the
    steps of a variance-preserving process in the released code.

    Source: RewardSDS, arXiv:2503.09601; code for images, itaychachy/RewardSDS.
    """

    steps: PositiveInt = 1000
    """Number of updates of a latent."""
    noises: PositiveInt = 8
    """Number N of noised copies of a latent per update."""
    weighting: NoiseWeighting = "min_max"
    """Function from the rewards of the copies to the weights of their gradients."""
    learning_rate: PositiveFloat = 1e-2
    """Learning rate of AdamW, in units of the latents."""
    levels: tuple[UnitInterval, UnitInterval] = (0.02, 0.98)
    """Lowest and highest noise level."""

    def __post_init__(self) -> None:
        """Reject too few noises for the weighting, and levels that do not increase."""
        require_ranges(self, "reward_sds")
        if self.noises < (fewest := FEWEST_NOISES[self.weighting]):
            needs = f"weighting {self.weighting} needs at least {fewest}"
            remedy = "raise it, or choose best, softmax or none"
            raise ValueError(f"reward_sds.noises is {self.noises}, but {needs}: {remedy}")
        if not self.levels[0] < self.levels[1]:
            raise ValueError(f"reward_sds.levels is {list(self.levels)}; the first must be lower")


@torch.no_grad()
def optimise(
    policy: Policy,
    score: Score,
    requests: Sequence[Request],
    cfg: RewardSDS,
    num_steps: int,
    generators: Sequence[torch.Generator],
    micro_batch: int,
) -> Float[Tensor, "n *latent"]:
    """Return an optimised latent for each request.

    Latents start as noise. Noised copies are completed along the schedule of `num_steps`. All draws
    of a request come from its own generator.
    """
    x0 = torch.cat([policy.noise(1, generator) for generator in generators])
    cond, row = encode_once(policy, requests)
    row, sigmas = row.repeat_interleave(cfg.noises).to(x0.device), policy.schedule(num_steps)
    repeated = [request for request in requests for _ in range(cfg.noises)]
    low, high = cfg.levels[0], min(cfg.levels[1], float(sigmas[0]))
    optimizer = torch.optim.AdamW([x0], lr=cfg.learning_rate, betas=(0.9, 0.99), eps=1e-15)
    for _ in range(cfg.steps):
        level = torch.cat(
            [torch.rand(1, generator=generator, dtype=torch.float32) for generator in generators]
        )
        sigma = (low + (high - low) * level).to(x0.device).repeat_interleave(cfg.noises)
        noise = torch.cat([policy.noise(cfg.noises, generator) for generator in generators])
        clean = x0.repeat_interleave(cfg.noises, 0)
        x = add_noise(clean, noise, sigma)
        v = evaluate_velocity(policy, x, sigma, cond, row, micro_batch)
        if cfg.weighting == "none":
            reward = x.new_zeros(len(x))
        else:
            ends = complete_states(policy, x, v, sigma, sigmas, cond, row, micro_batch)
            reward = score(ends, repeated).to(x)
        weights = noise_weights(reward.unflatten(0, (-1, cfg.noises)), cfg.weighting)
        each = distillation_gradient(v, clean, noise, sigma).unflatten(0, (-1, cfg.noises))
        x0.grad = torch.einsum("nk,nk...->n...", weights, each)
        optimizer.step()
    return x0


def complete_states(
    field: VelocityField,
    x: Float[Tensor, "m *latent"],
    v: Float[Tensor, "m *latent"],
    sigma: Float[Tensor, "m"],
    sigmas: Float[Tensor, "S"],
    cond: Cond,
    row: Int[Tensor, "m"],
    micro_batch: int,
) -> Float[Tensor, "m *latent"]:
    """Return clean latents of states at individual noise levels, by Euler steps of a schedule.

    The first step uses the velocity v and leads to the next level of the schedule.
    """
    x, first = x.clone(), torch.ones(len(x), dtype=torch.bool, device=x.device)
    for here, there in pairwise(sigmas):
        start, stop = sigma.clamp(max=float(here)), sigma.clamp(max=float(there))
        active = start > stop
        later = (active & ~first).nonzero().flatten()
        step = v.clone()
        if len(later):
            step[later] = evaluate_velocity(
                field, x[later], start[later], cond, row[later], micro_batch
            )
        x = x + per_row(stop - start, x) * step
        first = first & ~active
    return x
