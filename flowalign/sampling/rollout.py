"""Sample trajectories and clean latents: the only denoising loop in the code base."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, TypeAlias, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.functional.entropy import merged_schedule
from flowalign.functional.transition import FlowSDE, Kernel, log_density, sample_next, transition
from flowalign.sampling.branching import Branching, Chain, Layout, layout
from flowalign.sampling.completion import BatchedCompletion, CompletionRequest, velocity
from flowalign.sampling.frame_windows import FrameWindow, frame_windows, shared_outside
from flowalign.sampling.sde_windows import AllButLast, SDEWindow
from flowalign.types import Cond, Policy, Request, SharedRows, Trajectory
from flowalign.utils.ranges import (
    DenoisingSteps,
    GroupSize,
    PositiveFloat,
    PositiveInt,
    Range,
    require_ranges,
)

Key = TypeVar("Key")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Configures where and how precisely the states of a rollout are kept for training."""

    device: Literal["same", "cpu"] = "same"
    """same: on the policy's device. cpu: in main memory, at the price of a copy of each kept state
    and of each minibatch."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of kept states. The rollout continues from the rounded states, so that replay sees
    what the policy saw."""

    def rounded(self, x: Float[Tensor, "n *latent"]) -> Float[Tensor, "n *latent"]:
        """Return a state in float32 after rounding to the stored precision."""
        return x.to(DTYPES[self.dtype]).float()

    def kept(self, x: Float[Tensor, "n *latent"]) -> Float[Tensor, "n *latent"]:
        """Return a rounded state in the precision and on the device of kept states."""
        return self.placed(x.to(DTYPES[self.dtype]))

    def placed(self, x: Float[Tensor, "n *latent"]) -> Float[Tensor, "n *latent"]:
        """Return a tensor on the device of kept states."""
        return x.cpu() if self.device == "cpu" else x


NoiseLevel: TypeAlias = Annotated[float, Range(above=0, most=10)]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Configures how the trajectories of a prompt are drawn."""

    num_steps: DenoisingSteps = 10
    """T, denoising steps of a trajectory. Default: 10, as in Flow-GRPO's SD3.5 runs."""
    samples_per_prompt: GroupSize = 24
    """G, the size of the group whose members are compared. Default: 24, as in Flow-GRPO's SD3.5
    runs."""
    eta: NoiseLevel | list[NoiseLevel] = 0.7
    """Noise level inside the window, or one for each step; its meaning is the kernel's. Default:
    0.7, as in Flow-GRPO."""
    kernel: Kernel = field(default_factory=FlowSDE)
    """Transition family: how a step adds noise."""
    sde_window: SDEWindow = field(default_factory=AllButLast)
    """Steps that are stochastic and trained; all others are ODE steps."""
    seeds_per_prompt: PositiveInt | None = None
    """Number of different initial noises among the samples of a prompt. Null: one per sample for
    chains, 1 for trees and combs. 1: all samples share it (DanceGRPO, MixGRPO). TempFlow-GRPO:
    4."""
    branching: Branching = field(default_factory=Chain)
    """Arrangement of the samples of one initial noise: chain, tree or comb."""
    merge: PositiveFloat | None = None
    """Entropy to reach: makes the one SDE step so long that exp(entropy per element) is this.
    E-GRPO: 2.2. Null: no step is merged."""
    frame_window: FrameWindow | None = None
    """Latent frames of a video in which the samples of a prompt differ. Null: all of them."""
    states: Storage = field(default_factory=Storage)
    """Device and precision of the states that are kept for training."""
    micro_batch: PositiveInt = 64
    """Samples per network call, decode and reward call; the memory of a rollout grows with it."""

    def __post_init__(self) -> None:
        """Reject settings that no run can use, before anything heavy is loaded."""
        require_ranges(self, "sampling")
        if isinstance(self.eta, list) and len(self.eta) != self.num_steps:
            raise ValueError(
                f"sampling.eta has {len(self.eta)} levels for {self.num_steps} steps; "
                "give one number, or one for each step"
            )

    @property
    def _levels(self) -> list[float]:
        return self.eta if isinstance(self.eta, list) else [self.eta]

    def layout(self, steps: Sequence[int]) -> Layout:
        """Return the samples of one prompt, stochastic in `steps`.

        Raises:
            ValueError: The samples cannot be arranged in this way.
        """
        if self.merge is not None and len(steps) != 1:
            raise ValueError(
                f"sampling.merge makes one stochastic step longer; the window has {len(steps)}: "
                "set it to null, or recipe.sampling.sde_window to one of size 1"
            )
        eta = torch.zeros(self.num_steps)
        eta[list(steps)] = torch.tensor(self.eta).expand(self.num_steps)[list(steps)]
        seeds = self.seeds_per_prompt
        if seeds is None:
            seeds = self.samples_per_prompt if isinstance(self.branching, Chain) else 1
        arranged = layout(self.branching, self.samples_per_prompt, seeds, eta)
        if (loudest := float(arranged.eta.max())) > self.kernel.largest_eta:
            raise ValueError(
                f"sampling.eta is {self.eta}, up to {loudest:g} where it branches; "
                f"{type(self.kernel).__name__} takes at most {self.kernel.largest_eta:g}"
                if loudest > max(self._levels)
                else f"sampling.eta is {self.eta}; {type(self.kernel).__name__} takes at most "
                f"{self.kernel.largest_eta:g}: there all of the next state's noise is fresh"
            )
        return arranged

    def num_starts(self, steps: Sequence[int]) -> int:
        """Return the number of different initial noises per prompt."""
        return len(self.layout(steps).rows.source_row[:, 0].unique())


@torch.no_grad()
def sample(
    policy: Policy,
    requests: Sequence[Request],
    cfg: Sampling,
    steps: Sequence[int],
    generators: Sequence[torch.Generator],
    keep_means: bool = False,
    finish: Collection[CompletionRequest] = (),
    keep: Collection[int] | None = None,
) -> Trajectory:
    """Draw `cfg.samples_per_prompt` trajectories per request, stochastic in `steps`, ODE elsewhere.

    Each request has its own generator: how requests are spread over processes changes no draw. The
    states in `finish` are completed on the way: their completions take each step in one network
    call with the trajectories, so that there are T calls, however many states are completed. Only
    the states in `keep` are kept, all of them if it is None; that changes no draw either.
    """
    trajectory = _scheduled(policy, requests, cfg, steps)
    noise = _Noise(policy, cfg, steps, trajectory, generators)
    rows, x = trajectory.rows, cfg.states.rounded(noise.start)
    completion, means = BatchedCompletion(trajectory, finish), {}
    states: dict[int, Tensor] = {}

    def put(k: int) -> None:
        if keep is None or k in keep:
            states[k] = cfg.states.kept(rows.select(x, k))

    put(0)
    for k in range(cfg.num_steps):
        eta = trajectory.eta[:, k]
        unique = rows.unique_rows(k)
        v = completion.step(policy, k, rows.select(x, k), unique, cfg.micro_batch)
        distribution = transition(cfg.kernel, x, rows.expand(v, k), trajectory.sigmas, k, eta)
        x = sample_next(distribution, noise.of(k)) if k in steps else distribution.mean
        x = cfg.states.rounded(rows.share(x, k + 1))
        logp = log_density(cfg.kernel, x, distribution)
        trajectory.logp[:, k] = torch.where(eta > 0, logp, 0.0)
        if keep_means and k in steps:
            means[k] = cfg.states.placed(distribution.mean)
        put(k + 1)
    finished = {request: cfg.states.placed(x) for request, x in completion.at.items()}
    return replace(trajectory, states=states, means=means, finished=finished)


def empty_trajectory(
    cfg: Sampling, steps: Sequence[int], requests: Sequence[Request], sigmas: Float[Tensor, "S"]
) -> Trajectory:
    """Return trajectories before they are drawn: no states, on the device of the schedule."""
    one, group = cfg.layout(steps), cfg.samples_per_prompt
    return Trajectory(
        logp=torch.zeros(len(requests) * group, cfg.num_steps, device=sigmas.device),
        states={},
        sigmas=sigmas,
        eta=one.eta.repeat(len(requests), 1).to(sigmas.device),
        kernel=cfg.kernel,
        cond={},
        requests=[request for request in requests for _ in range(group)],
        group_size=group,
        rows=one.rows.repeat(len(requests)),
    )


def concat_trajectories(parts: Sequence[Trajectory]) -> Trajectory:
    """Concatenate the samples of several trajectories of one schedule.

    The parts give up their states, means and completions one key after the other, so that no tensor
    is held twice.
    """
    first = parts[0]
    return replace(
        first,
        logp=torch.cat([part.logp for part in parts]),
        states=_taken([part.states for part in parts]),
        eta=torch.cat([part.eta for part in parts]),
        cond={name: torch.cat([part.cond[name] for part in parts]) for name in first.cond},
        requests=[request for part in parts for request in part.requests],
        rows=SharedRows.concat([part.rows for part in parts]),
        means=_taken([part.means for part in parts]),
        finished=_taken([part.finished for part in parts]),
    )


def _taken(parts: Sequence[Mapping[Key, Tensor]]) -> dict[Key, Tensor]:
    """Concatenate the rows of all parts by key, and remove them from the parts."""
    held = [part for part in parts if isinstance(part, dict)]
    assert len(held) == len(parts), "a trajectory that was drawn holds its tensors in dictionaries"
    return {key: torch.cat([part.pop(key) for part in held]) for key in [*held[0]]}


@torch.no_grad()
def generate(
    policy: Policy,
    requests: Sequence[Request],
    num_steps: int,
    generators: Sequence[torch.Generator],
    micro_batch: int,
) -> Float[Tensor, "n *latent"]:
    """Sample one clean latent per request, as the model's own pipeline does: deterministically."""
    x = torch.cat([policy.noise(1, generator) for generator in generators])
    cond, row = encode_once(policy, requests)
    row = row.to(x.device)
    sigmas = policy.schedule(num_steps)
    for k in range(num_steps):
        v = velocity(policy, x, sigmas[k], cond, row, micro_batch)
        x = x + (sigmas[k + 1] - sigmas[k]) * v
    return x


def encode_once(policy: Policy, requests: Sequence[Request]) -> tuple[Cond, Int[Tensor, "n"]]:
    """Return the conditioning of different requests, and the row of each of the given ones."""
    given = {request.given: request for request in requests}
    unique = sorted(given.values(), key=lambda request: (request.prompt, request.given))
    place = {request.given: i for i, request in enumerate(unique)}
    return policy.encode(unique), torch.tensor([place[request.given] for request in requests])


def _scheduled(
    policy: Policy, requests: Sequence[Request], cfg: Sampling, steps: Sequence[int]
) -> Trajectory:
    """Return trajectories with requests encoded and the policy's schedule, but no states.

    If steps are merged, one step of the schedule is longer.
    """
    trajectory = empty_trajectory(cfg, steps, requests, policy.schedule(cfg.num_steps))
    sigmas = trajectory.sigmas
    if cfg.merge is not None:
        eta, k = trajectory.eta[:, steps[0]].amax(), steps[0]
        sigmas = merged_schedule(cfg.kernel, sigmas, k, eta, cfg.merge)
    return replace(trajectory, sigmas=sigmas, cond=policy.encode(requests))


class _Noise:
    """Draws everything that is random in a rollout, and puts it on the policy's device."""

    def __init__(
        self,
        policy: Policy,
        cfg: Sampling,
        steps: Sequence[int],
        trajectory: Trajectory,
        generators: Sequence[torch.Generator],
    ):
        x = torch.cat([policy.noise(cfg.num_starts(steps), generator) for generator in generators])
        self.branching, self.trajectory, self.generators = cfg.branching, trajectory, generators
        self.shape, self.device = (cfg.samples_per_prompt, *x.shape[1:]), x.device
        window = cfg.frame_window
        self.windows = frame_windows(window, x.shape[1:], generators) if window else []
        self.start: Tensor = trajectory.rows.expand(self._shared(x), 0)
        """State 0 of every sample."""

    def of(self, k: int) -> Float[Tensor, "B *latent"]:
        """Draw the noise of step k; samples share a common part by the state that they leave."""
        noise, scale = self._drawn(), self.branching.sibling_noise_scale
        if scale is not None:
            common = self.trajectory.rows.share(self._drawn(), k)
            noise = (common + scale * noise) / (1 + scale**2) ** 0.5
        return self._shared(noise).to(self.device)

    def _drawn(self) -> Tensor:
        return torch.cat([torch.randn(self.shape, generator=g) for g in self.generators])

    def _shared(self, noise: Tensor) -> Tensor:
        return shared_outside(noise, self.windows) if self.windows else noise
