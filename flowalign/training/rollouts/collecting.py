"""Sample the requests of a step, and value the states of their trajectories."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from jaxtyping import Float
from torch import Tensor

from flowalign.rewards.composite import Rewards
from flowalign.sampling.complete_states import CompletionRequest, complete
from flowalign.sampling.recording import RolloutOutputs
from flowalign.sampling.rollout import concat_trajectories, sample
from flowalign.sampling.sampling_settings import Sampling
from flowalign.training.learner import Learner
from flowalign.training.reference import unguided
from flowalign.training.rollouts.rollout_settings import RolloutSettings
from flowalign.training.rollouts.state_values import NO_EXPERIENCE, CompletionValues, Experience
from flowalign.types import Policy, Request, Trajectory
from flowalign.utils.seeds import generator


def collect_rollouts(
    cfg: RolloutSettings,
    learner: Learner,
    rewards: Rewards,
    requests: Sequence[Request],
    seed: int,
    step: int,
    earlier: Experience = NO_EXPERIENCE,
) -> CompletionValues:
    """Sample this rank's share of the requests, and return the values of the trajectories.

    If `rollout_batch_prompts` is smaller than the share, the rewards of one batch of prompts are
    computed while the next batch is sampled.
    """
    local = learner.processes.share(range(len(requests)))
    size = cfg.rollout_batch_prompts or max(len(local), 1)
    batches = [local[start : start + size] for start in range(0, len(local), size)] or [local]
    drawn = (sample_prompts(cfg, learner.policy, requests, seed, step, b) for b in batches)
    if len(batches) == 1:
        return completion_values(cfg, learner, rewards, next(drawn), earlier)
    trajectories, parts = [], []
    for trajectory in drawn:
        values = completion_values(cfg, learner, rewards, trajectory)
        values.request([(trajectory.num_steps, cfg.completion), *trajectory.finished])
        trajectories.append(trajectory)
        parts.append(values)
    whole = concat_trajectories(trajectories)
    return completion_values(cfg, learner, rewards, whole, earlier, parts)


def rollout(
    cfg: RolloutSettings, learner: Learner, requests: Sequence[Request], seed: int, step: int
) -> Trajectory:
    """Return the trajectories of this rank's share of the requests, all sampled together."""
    local = learner.processes.share(range(len(requests)))
    return sample_prompts(cfg, learner.policy, requests, seed, step, local)


def sample_prompts(
    cfg: RolloutSettings,
    policy: Policy,
    requests: Sequence[Request],
    seed: int,
    step: int,
    indices: Sequence[int],
) -> Trajectory:
    """Return trajectories of some requests of a step.

    All ranks use the same window. The noise depends only on the position of the request.
    """
    # Noise is seeded by the request's position, so ranks and batches do not change the draws.
    window = cfg.window(step, generator(seed, "window", step))
    with _use_precision(cfg.sampling, policy):
        return sample(
            policy,
            [requests[i] for i in indices],
            cfg.sampling,
            window,
            [generator(seed, "noise", step, i) for i in indices],
            finish=[request for request in cfg.requested(window) if request[1].follows_rollout],
            keep=RolloutOutputs(
                states=cfg.kept_states(window),
                features=cfg.observed_states(window),
                means=cfg.needs_means,
            ),
        )


def _use_precision(sampling: Sampling, policy: Policy) -> AbstractContextManager[None]:
    """Return a context with the precision of rollouts, if it differs from the policy's."""
    if sampling.precision is None or policy.network is None:
        return nullcontext()
    return policy.network.reduce_precision(sampling.precision)


def completion_values(
    cfg: RolloutSettings,
    learner: Learner,
    rewards: Rewards,
    trajectory: Trajectory,
    earlier: Experience = NO_EXPERIENCE,
    parts: Sequence[CompletionValues] = (),
) -> CompletionValues:
    """Return the value function of a trajectory for the recipe's credit method."""
    size = cfg.sampling.micro_batch
    return CompletionValues(
        learner.policy,
        rewards,
        trajectory,
        finish=lambda requests: finish_states(learner, trajectory, requests, size),
        how=cfg.completion,
        micro_batch=size,
        earlier=earlier,
        parts=parts,
    )


def finish_states(
    learner: Learner,
    trajectory: Trajectory,
    requests: Sequence[CompletionRequest],
    micro_batch: int,
) -> dict[CompletionRequest, Float[Tensor, "n *latent"]]:
    """Return the completed latents of the requested states, from the rollout or computed now."""
    device, known = trajectory.device, trajectory.finished
    done = {request: known[request].to(device) for request in requests if request in known}
    for how in {request[1] for request in requests if request not in done}:
        missing = [request for request in requests if request[1] == how and request not in done]
        field = learner.reference if how.weights == "reference" else learner.policy
        field = unguided(field) if how.guidance == "off" else field
        average = learner.averaged("ema") if how.weights == "ema" and learner.ema else nullcontext()
        with average:
            done |= complete(field, trajectory, missing, micro_batch)
    return done
