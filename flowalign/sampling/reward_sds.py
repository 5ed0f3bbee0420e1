"""Optimise latents by score distillation whose noises are weighted by their rewards: RewardSDS."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.functional.noise_matching import add_noise
from flowalign.functional.score_distillation import (
    FEWEST_NOISES,
    NoiseWeighting,
    distillation_gradient,
    noise_weights,
)
from flowalign.functional.transition import per_row
from flowalign.sampling.complete_states import evaluate_velocity
from flowalign.sampling.inference import encode_once
from flowalign.types import Cond, Policy, Request, VelocityField
from flowalign.types.ranges import PositiveFloat, PositiveInt, UnitInterval, require_ranges

Score = Callable[[Float[Tensor, "m *latent"], Sequence[Request]], Float[Tensor, "m"]]
"""Returns the reward of clean latents."""


@dataclass(frozen=True, kw_only=True)
class RewardSDS:
    """Configures the optimisation of latents.

    Of each latent, several noised copies of one level are completed and scored; the gradients of
    score distillation at these copies are then weighted by their rewards.

    Guidance is the policy's, for completions and gradients alike; the authors' code completes with
    7.5 and takes gradients with 100. Levels are uniform in sigma, theirs in the steps of a
    variance-preserving process.

    Source: RewardSDS, arXiv:2503.09601; its code of pictures, itaychachy/RewardSDS.
    """

    steps: PositiveInt = 1000
    """Updates of a latent."""
    noises: PositiveInt = 8
    """N, noised copies of a latent for each update."""
    weighting: NoiseWeighting = "min_max"
    """How the gradients of the copies are weighted by their rewards."""
    learning_rate: PositiveFloat = 1e-2
    """Learning rate of AdamW, in units of the latents."""
    levels: tuple[UnitInterval, UnitInterval] = (0.02, 0.98)
    """Lowest and highest noise level."""

    def __post_init__(self) -> None:
        """Reject fewer noises than the weighting tells apart, and levels out of order."""
        require_ranges(self, "reward_sds")
        if self.noises < (fewest := FEWEST_NOISES[self.weighting]):
            raise ValueError(
                f"reward_sds.noises is {self.noises}, but weighting {self.weighting} needs at "
                f"least {fewest}: raise it, or choose best, softmax or none"
            )
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
    """Return an optimised latent for each request, whose own generator makes all of its draws.

    Latents begin as noise, and are completed along the schedule of `num_steps`.
    """
    x0 = torch.cat([policy.noise(1, generator) for generator in generators])
    cond, row = encode_once(policy, requests)
    row, sigmas = row.repeat_interleave(cfg.noises).to(x0.device), policy.schedule(num_steps)
    repeated = [request for request in requests for _ in range(cfg.noises)]
    low, high = cfg.levels[0], min(cfg.levels[1], float(sigmas[0]))
    optimizer = torch.optim.AdamW([x0], lr=cfg.learning_rate, betas=(0.9, 0.99), eps=1e-15)
    for _ in range(cfg.steps):
        level = torch.cat([torch.rand(1, generator=generator) for generator in generators])
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
    """Return the clean latents of states at levels of their own, by Euler steps of a schedule.

    The first step, whose velocity is v, leads from a state's level to the schedule's next one.
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
