"""Sampling: the only denoising loop in the code base."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.functional.transition import FlowSDE, Kernel, log_density, sample_next, transition
from flowalign.types import Cond, Policy, Trajectory, VelocityField
from flowalign.windows import AllButLast, Window

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the trajectories of one prompt are drawn."""

    num_steps: int = 10
    samples_per_prompt: int = 24
    """G, the size of the group whose members are compared."""
    eta: float = 0.7
    """Noise level inside the window; its meaning is the kernel's."""
    kernel: Kernel = field(default_factory=FlowSDE)
    window: Window = field(default_factory=AllButLast)
    """The steps that are stochastic and trained."""
    initial_noise: Literal["independent", "shared"] = "independent"
    """shared: one x_0 for the whole group (DanceGRPO, MixGRPO)."""
    state_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """What states are stored in; states are rounded to it before their log-probability is taken."""
    micro_batch: int = 64
    """Samples per network call."""

    def __post_init__(self) -> None:
        """Reject what no run can use, before anything heavy is loaded."""
        for name in ("num_steps", "samples_per_prompt", "micro_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"sampling.{name} is {getattr(self, name)}; it must be at least 1")
        if not self.eta > 0:
            raise ValueError(f"sampling.eta is {self.eta}; exploration needs a noise level above 0")


@torch.no_grad()
def sample(
    policy: Policy,
    prompts: Sequence[str],
    cfg: Sampling,
    steps: Sequence[int],
    generators: Sequence[torch.Generator],
    keep_means: bool = False,
    keep_velocities: Collection[int] = (),
) -> Trajectory:
    """Draw `cfg.samples_per_prompt` trajectories per prompt, stochastic in `steps`, ODE elsewhere.

    Each prompt has its own generator: how prompts are spread over processes changes no draw.
    """
    cond, group = policy.encode(prompts), cfg.samples_per_prompt
    x = torch.cat([_initial(policy, cfg, generator) for generator in generators])
    row = torch.arange(len(x), device=x.device) // group
    sigmas, eta = policy.schedule(cfg.num_steps), _etas(cfg, steps, x.device)
    store = DTYPES[cfg.state_dtype]
    x = x.to(store).float()
    states, logps, means, velocities = [x.to(store)], [], {}, {}
    for k in range(cfg.num_steps):
        v = velocity(policy, x, sigmas[k], cond, row, cfg.micro_batch)
        if k in keep_velocities:
            velocities[k] = v
        distribution = transition(cfg.kernel, x, v, sigmas, k, eta[k].expand(len(x)))
        noisy = sample_next(distribution, _noise(x, generators)) if k in steps else None
        x = (distribution.mean if noisy is None else noisy).to(store).float()
        logp = log_density(cfg.kernel, x, distribution)
        logps.append(torch.zeros_like(logp) if noisy is None else logp)
        if keep_means and k in steps:
            means[k] = distribution.mean
        states.append(x.to(store))
    return Trajectory(
        logp=torch.stack(logps, 1),
        states=torch.stack(states, 1),
        sigmas=sigmas,
        eta=eta.expand(len(x), -1),
        kernel=cfg.kernel,
        cond=cond,
        prompts=[prompt for prompt in prompts for _ in range(group)],
        group_size=group,
        means=means,
        velocities=velocities,
    )


@torch.no_grad()
def generate(
    policy: Policy,
    prompts: Sequence[str],
    num_steps: int,
    generators: Sequence[torch.Generator],
    micro_batch: int,
) -> Float[Tensor, "n *latent"]:
    """Clean latents by the deterministic sampler, as the model's own pipeline; one per prompt."""
    x = torch.cat([policy.noise(1, generator) for generator in generators])
    unique = sorted(set(prompts))
    cond = policy.encode(unique)
    row = torch.tensor([unique.index(prompt) for prompt in prompts], device=x.device)
    sigmas = policy.schedule(num_steps)
    for k in range(num_steps):
        v = velocity(policy, x, sigmas[k], cond, row, micro_batch)
        x = x + (sigmas[k + 1] - sigmas[k]) * v
    return x


def velocity(
    field: VelocityField,
    x: Float[Tensor, "n *latent"],
    sigma: Float[Tensor, ""],
    cond: Cond,
    row: Int[Tensor, "n"],
    micro_batch: int,
) -> Float[Tensor, "n *latent"]:
    """`field.velocity` in chunks; sample i is conditioned on row[i] of cond."""
    chunks = zip(x.split(micro_batch), row.split(micro_batch), strict=True)
    return torch.cat([field.velocity(part, sigma, take(cond, rows)) for part, rows in chunks])


def take(cond: Cond, rows: Int[Tensor, "n"]) -> dict[str, Tensor]:
    """The given rows of every conditioning tensor."""
    return {name: value[rows] for name, value in cond.items()}


def _initial(policy: Policy, cfg: Sampling, generator: torch.Generator) -> Tensor:
    if cfg.initial_noise == "independent":
        return policy.noise(cfg.samples_per_prompt, generator)
    return policy.noise(1, generator).repeat_interleave(cfg.samples_per_prompt, 0)


def _noise(x: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    shape = (len(x) // len(generators), *x.shape[1:])
    return torch.cat([torch.randn(shape, generator=generator) for generator in generators]).to(x)


def _etas(cfg: Sampling, steps: Sequence[int], device: torch.device) -> Float[Tensor, "T"]:
    eta = torch.zeros(cfg.num_steps, device=device)
    eta[list(steps)] = cfg.eta
    return eta
