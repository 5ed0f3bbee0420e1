"""Sample trajectories: the only denoising loop of training."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.functional.solver import merge_steps, thin_schedule
from flowalign.functional.transition import log_density
from flowalign.sampling.sampling_settings import Sampling
from flowalign.sampling.stepping import RolloutNoise, RolloutVelocities, Stepper
from flowalign.types import Policy, Request, SharedRows, Trajectory, encode_requests
from flowalign.types.trajectory import CompletionRequest
from flowalign.utils.costs import stage

Key = TypeVar("Key")


@dataclass(frozen=True, kw_only=True)
class RolloutOutputs:
    """Selection of the tensors that a rollout keeps; it does not change the random draws."""

    states: Collection[int] | None = None
    """Indices of the states to keep. None: all."""
    features: Collection[int] = ()
    """Indices of the states to record denoiser features of."""
    means: bool = False
    """Whether to keep the means of the trained transitions."""
    graphs: bool = False
    """Whether to keep the graphs of the velocities of trained steps, for one update."""


@stage("sample")
@torch.no_grad()
def sample(
    policy: Policy,
    requests: Sequence[Request],
    cfg: Sampling,
    steps: Sequence[int],
    generators: Sequence[torch.Generator],
    finish: Collection[CompletionRequest] = (),
    keep: RolloutOutputs = RolloutOutputs(),
    start: Float[Tensor, "n *latent"] | None = None,
) -> Trajectory:
    """Return `cfg.samples_per_prompt` trajectories per request; `steps` are the trained steps.

    Each request has its own generator, so the distribution of requests over processes does not
    change the draws. The states in `finish` are completed within the T network calls of the
    rollout. `start` are initial noises that replace the drawn ones.
    """
    trajectory = _plan_trajectory(policy, requests, cfg, steps)
    kept = steps if keep.graphs else ()
    velocities = RolloutVelocities(policy, trajectory, finish, keep.features, cfg.micro_batch, kept)
    noise = RolloutNoise(policy, cfg, steps, trajectory, generators, start)
    stepper, storage = Stepper(noise, policy, cfg, steps, trajectory), cfg.states
    states, means = dict[int, Tensor](), dict[int, Tensor]()
    x, skipped = stepper.start(), cfg.skipped(steps)
    for k in range(cfg.num_steps + 1):
        if keep.states is None or k in keep.states:
            states[k] = storage.store(trajectory.rows.select(x, k))
        if k in skipped or k == cfg.num_steps:
            continue
        # The distribution is the policy's, without reward guidance.
        distribution, x = stepper.step(k, x, velocities.evaluate(k, x))
        # x is already rounded and shared, so replay computes the same log-probability.
        logp = log_density(trajectory.kernel, x, distribution)
        trajectory.logp[:, k] = logp.where(trajectory.eta[:, k] > 0, 0.0)
        if keep.means and k in steps:
            means[k] = storage.place(distribution.mean)
    finished = {request: storage.place(end) for request, end in velocities.completion.at.items()}
    found = {"states": states, "means": means, "finished": finished}
    return replace(trajectory, **found, hidden=velocities.features, graphs=velocities.graphs)


def empty_trajectory(
    cfg: Sampling, steps: Sequence[int], requests: Sequence[Request], sigmas: Float[Tensor, "S"]
) -> Trajectory:
    """Return trajectories without states, on the device of the schedule."""
    one, group = cfg.layout(steps), cfg.samples_per_prompt
    return Trajectory(
        logp=sigmas.new_zeros(len(requests) * group, cfg.num_steps),
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
    """Concatenate the samples of several trajectories with the same schedule.

    States, means and completions are removed from the parts key by key, so that no tensor is held
    twice.
    """
    first = parts[0]
    return replace(
        first,
        logp=torch.cat([part.logp for part in parts]),
        states=_join_rows([part.states for part in parts]),
        eta=torch.cat([part.eta for part in parts]),
        cond={name: torch.cat([part.cond[name] for part in parts]) for name in first.cond},
        requests=[request for part in parts for request in part.requests],
        rows=SharedRows.concat([part.rows for part in parts]),
        means=_join_rows([part.means for part in parts]),
        finished=_join_rows([part.finished for part in parts]),
        hidden=_join_rows([part.hidden for part in parts]),
    )


def _join_rows(parts: Sequence[Mapping[Key, Tensor]]) -> dict[Key, Tensor]:
    """Concatenate the rows of all parts by key, and remove them from the parts."""
    held = [part for part in parts if isinstance(part, dict)]
    assert len(held) == len(parts), "a trajectory that was drawn holds its tensors in dictionaries"
    return {key: torch.cat([part.pop(key) for part in held]) for key in [*held[0]]}


def _plan_trajectory(
    policy: Policy, requests: Sequence[Request], cfg: Sampling, steps: Sequence[int]
) -> Trajectory:
    """Return trajectories with encoded requests and the sampling schedule, but no states.

    `cfg.merge` makes one step of the schedule longer, and `cfg.tail_ratio` those of the tail.
    """
    trajectory = empty_trajectory(cfg, steps, requests, policy.schedule(cfg.num_steps))
    sigmas = trajectory.sigmas
    if cfg.merge is not None:
        eta, k = trajectory.eta[:, steps[0]].amax(), steps[0]
        sigmas = merge_steps(cfg.kernel, sigmas, k, eta, cfg.merge)
    if cfg.tail_ratio is not None:
        sigmas = thin_schedule(sigmas, cfg.tail(steps))
    return replace(trajectory, sigmas=sigmas, cond=encode_requests(policy, requests))
