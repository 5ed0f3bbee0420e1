"""TODO module docstring."""

from collections.abc import Sequence
from contextlib import nullcontext

from jaxtyping import Float
from torch import Tensor

from flowalign.rewards.composite import Rewards
from flowalign.sampling.completion import Tail, complete
from flowalign.sampling.rollout import joined, sample
from flowalign.training.learner import Learner
from flowalign.training.policy_gradient.recipe import Online
from flowalign.training.policy_gradient.state_values import StateValues
from flowalign.training.reference import unguided
from flowalign.types import Trajectory
from flowalign.utils.seeds import generator


def rollout(
    cfg: Online, learner: Learner, prompts: Sequence[str], seed: int, step: int
) -> Trajectory:
    """Sample my share of the prompts; the window is everyone's, the noise belongs to the prompt."""
    return _sampled(cfg, learner, prompts, seed, step, learner.processes.share(range(len(prompts))))


def explore(
    cfg: Online, learner: Learner, rewards: Rewards, prompts: Sequence[str], seed: int, step: int
) -> StateValues:
    """Sample my share of the prompts, some at a time: those sampled are scored meanwhile."""
    mine = learner.processes.share(range(len(prompts)))
    at_once = cfg.prompts_at_once or max(len(mine), 1)
    if len(mine) <= at_once:
        trajectory = rollout(cfg, learner, prompts, seed, step)
        return state_values(cfg, learner, rewards, trajectory)
    trajectories, parts = [], []
    for start in range(0, len(mine), at_once):
        some = mine[start : start + at_once]
        trajectory = _sampled(cfg, learner, prompts, seed, step, some)
        values = state_values(cfg, learner, rewards, trajectory)
        values.ask([(trajectory.num_steps, cfg.completion), *trajectory.finished])
        trajectories.append(trajectory)
        parts.append(values)
    values = state_values(cfg, learner, rewards, joined(trajectories))
    values.parts = parts
    return values


def _sampled(
    cfg: Online,
    learner: Learner,
    prompts: Sequence[str],
    seed: int,
    step: int,
    mine: Sequence[int],
) -> Trajectory:
    window = cfg.sampling.window.steps(
        cfg.sampling.num_steps, step, generator(seed, "window", step)
    )
    return sample(
        learner.policy,
        [prompts[i] for i in mine],
        cfg.sampling,
        window,
        [generator(seed, "noise", step, i) for i in mine],
        keep_means=cfg.algorithm.needs_mean_old,
        finish=[tail for tail in cfg.asked(window) if tail[1].follows_rollout],
        keep=cfg.kept(window),
    )


def state_values(
    cfg: Online, learner: Learner, rewards: Rewards, trajectory: Trajectory
) -> StateValues:
    """The oracle that the credit method of a recipe asks about a trajectory."""
    size = cfg.sampling.micro_batch
    return StateValues(
        learner.policy, rewards, trajectory,
        finish=lambda tails: finished(learner, trajectory, tails, size),
        how=cfg.completion, micro_batch=size,
    )  # fmt: skip


def finished(
    learner: Learner, trajectory: Trajectory, tails: Sequence[Tail], micro_batch: int
) -> dict[Tail, Float[Tensor, "n *latent"]]:
    """Clean latents of the given states: those that the rollout finished, and all others now."""
    device, known = trajectory.device, trajectory.finished
    done = {tail: known[tail].to(device) for tail in tails if tail in known}
    for how in {tail[1] for tail in tails if tail not in done}:
        asked = [tail for tail in tails if tail[1] == how and tail not in done]
        field = learner.reference if how.weights == "reference" else learner.policy
        field = unguided(field) if how.guidance == "off" else field
        average = learner.ema.applied() if how.weights == "ema" and learner.ema else nullcontext()
        with average:
            done |= complete(field, trajectory, asked, micro_batch)
    return done
