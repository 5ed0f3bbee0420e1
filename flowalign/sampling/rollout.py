"""Sample trajectories and clean latents: the only denoising loop in the code base."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.functional.entropy import merged_schedule
from flowalign.functional.solver import second_order_step, thinned_schedule
from flowalign.functional.transition import (
    FlowSDE,
    Gaussian,
    log_density,
    sample_next,
    transition,
)
from flowalign.sampling.completion import BatchedCompletion, CompletionRequest, velocity
from flowalign.sampling.features import Observed
from flowalign.sampling.frame_windows import frame_windows, shared_outside
from flowalign.sampling.guidance import GuidedStep, RewardGuidance, pushes
from flowalign.sampling.kept import Kept
from flowalign.sampling.prompt_guidance import PromptGuided
from flowalign.sampling.settings import Sampling
from flowalign.types import (
    Cond,
    Dressing,
    Policy,
    Request,
    SharedRows,
    Trajectory,
    VelocityField,
    conditioning,
)
from flowalign.utils.stages import stage

Key = TypeVar("Key")


@stage("sample")
@torch.no_grad()
def sample(
    policy: Policy,
    requests: Sequence[Request],
    cfg: Sampling,
    steps: Sequence[int],
    generators: Sequence[torch.Generator],
    finish: Collection[CompletionRequest] = (),
    keep: Kept = Kept(),  # noqa: B008 (frozen)
) -> Trajectory:
    """Draw `cfg.samples_per_prompt` trajectories per request, whose steps in `steps` are trained.

    Each request has its own generator: how requests are spread over processes changes no draw. The
    states in `finish` are completed on the way, in the T network calls of the trajectories.
    """
    trajectory = _scheduled(policy, requests, cfg, steps)
    noise = _Noise(policy, cfg, steps, trajectory, generators)
    rows, x = trajectory.rows, cfg.states.rounded(noise.start)
    completion, ode, means = BatchedCompletion(trajectory, finish), _ODE(cfg, steps), {}
    states, hidden = dict[int, Tensor](), dict[int, Tensor]()

    def put(k: int) -> None:
        if keep.states is None or k in keep.states:
            states[k] = cfg.states.kept(rows.select(x, k))

    put(0)
    for k in range(cfg.num_steps):
        if k in cfg.skipped(steps):
            put(k + 1)
            continue
        eta, distinct = trajectory.eta[:, k], (rows.select(x, k), rows.unique_rows(k))
        field = Observed(policy) if k in keep.features else policy
        v = rows.expand(completion.step(field, k, *distinct, cfg.micro_batch), k)
        if isinstance(field, Observed):
            hidden[k] = field.take(len(distinct[1])).cpu()
        distribution = transition(cfg.kernel, x, v, trajectory.sigmas, k, eta)
        drawn = _pushed(policy, cfg, trajectory, k, x, distribution)
        deterministic = ode.next(drawn.mean, x, v, trajectory.sigmas, k)
        x = sample_next(drawn, noise.of(k)) if k in cfg.stochastic(steps) else deterministic
        x = cfg.states.rounded(rows.share(x, k + 1))
        trajectory.logp[:, k] = log_density(cfg.kernel, x, distribution).where(eta > 0, 0.0)
        if keep.means and k in steps:
            means[k] = cfg.states.placed(distribution.mean)
        put(k + 1)
    finished = {request: cfg.states.placed(x) for request, x in completion.at.items()}
    return replace(trajectory, states=states, means=means, finished=finished, hidden=hidden)


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
        untrained=sorted({*cfg.stochastic(steps)} - {*steps}),
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
        hidden=_taken([part.hidden for part in parts]),
    )


def _pushed(
    policy: Policy,
    cfg: Sampling,
    trajectory: Trajectory,
    k: int,
    x: Float[Tensor, "B *latent"],
    plain: Gaussian,
) -> Gaussian:
    """Return the distribution that guidance draws step k from, computed for distinct states."""
    guidance, rows = cfg.reward_guidance, trajectory.rows
    if guidance is None or not guidance.active(trajectory.sigmas, k):
        return plain
    step = GuidedStep(trajectory.sigmas, k, cfg.kernel, rows.select(trajectory.eta[:, k], k))
    asked = (rows.unique_rows(k) // trajectory.group_size).to(x.device)
    states = rows.select(x, k), step, trajectory.cond, asked
    push = rows.expand(pushes(guidance, policy, *states, cfg.micro_batch), k)
    return Gaussian(plain.mean + push, plain.std)


def _taken(parts: Sequence[Mapping[Key, Tensor]]) -> dict[Key, Tensor]:
    """Concatenate the rows of all parts by key, and remove them from the parts."""
    held = [part for part in parts if isinstance(part, dict)]
    assert len(held) == len(parts), "a trajectory that was drawn holds its tensors in dictionaries"
    return {key: torch.cat([part.pop(key) for part in held]) for key in [*held[0]]}


@stage("sample")
@torch.no_grad()
def generate(
    policy: Policy,
    requests: Sequence[Request],
    num_steps: int,
    generators: Sequence[torch.Generator],
    micro_batch: int,
    guidance: RewardGuidance | None = None,
    dressing: Dressing | None = None,
) -> Float[Tensor, "n *latent"]:
    """Sample one clean latent per request, as the model's own pipeline does: deterministically.

    `guidance` pushes the steps up the gradient of a reward; `dressing` asks for requests as users
    are to ask for them.
    """
    x = torch.cat([policy.noise(1, generator) for generator in generators])
    field, cond, row = _asked(policy, requests, dressing)
    row = row.to(x.device)
    sigmas = policy.schedule(num_steps)
    for k in range(num_steps):
        v = velocity(field, x, sigmas[k], cond, row, micro_batch)
        following = x + (sigmas[k + 1] - sigmas[k]) * v
        if guidance and guidance.active(sigmas, k):
            step = GuidedStep(sigmas, k, FlowSDE(), x.new_zeros(len(x)))
            following = following + pushes(guidance, policy, x, step, cond, row, micro_batch)
        x = following
    return x


def _asked(
    policy: Policy, requests: Sequence[Request], dressing: Dressing | None
) -> tuple[VelocityField, Cond, Int[Tensor, "n"]]:
    """Return what is sampled with, its conditioning, and the row of each request."""
    if dressing is None:
        return policy, *encode_once(policy, requests)
    dressed = [dressing.at_sampling(request) for request in requests]
    if dressing.guidance is None:
        return policy, *encode_once(policy, dressed)
    guided = PromptGuided(policy, dressing.guidance)
    return guided, *_encode_rows(guided.encode, dressed)


def encode_once(policy: Policy, requests: Sequence[Request]) -> tuple[Cond, Int[Tensor, "n"]]:
    """Return the conditioning of different requests, and the row of each of the given ones."""
    return _encode_rows(partial(conditioning, policy), requests)


def _encode_rows(
    encode: Callable[[Sequence[Request]], Cond], requests: Sequence[Request]
) -> tuple[Cond, Int[Tensor, "n"]]:
    """Encode different requests once, like `encode_once`, by a function."""
    given = {request.given: request for request in requests}
    unique = sorted(given.values(), key=lambda request: (request.prompt, request.given))
    place = {request.given: i for i, request in enumerate(unique)}
    return encode(unique), torch.tensor([place[request.given] for request in requests])


def _scheduled(
    policy: Policy, requests: Sequence[Request], cfg: Sampling, steps: Sequence[int]
) -> Trajectory:
    """Return trajectories with requests encoded and the policy's schedule, but no states.

    If steps are merged, one step of the schedule is longer; a shorter tail has longer steps.
    """
    trajectory = empty_trajectory(cfg, steps, requests, policy.schedule(cfg.num_steps))
    sigmas = trajectory.sigmas
    if cfg.merge is not None:
        eta, k = trajectory.eta[:, steps[0]].amax(), steps[0]
        sigmas = merged_schedule(cfg.kernel, sigmas, k, eta, cfg.merge)
    if cfg.tail_ratio is not None:
        sigmas = thinned_schedule(sigmas, cfg.tail(steps))
    return replace(trajectory, sigmas=sigmas, cond=conditioning(policy, requests))


class _ODE:
    """Takes the deterministic steps of a rollout: of second order in a shorter tail, else Euler."""

    def __init__(self, cfg: Sampling, steps: Sequence[int]):
        self.tail = cfg.num_steps + 1 if cfg.tail_ratio is None else cfg.tail(steps)[0]
        self.before: tuple[Tensor, Tensor] | None = None
        """Sigma of the step before, and the data that was predicted there."""

    def next(self, mean: Tensor, x: Tensor, v: Tensor, sigmas: Tensor, k: int) -> Tensor:
        """Return the state after step k; `mean` is that of the Euler step."""
        if k + 1 < self.tail:
            return mean
        before, x0_hat = self.before, x - sigmas[k] * v
        self.before = sigmas[k], x0_hat
        if k < self.tail or before is None:
            return mean
        return second_order_step(x, x0_hat, before[1], before[0], sigmas[k], sigmas[k + 1])


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
