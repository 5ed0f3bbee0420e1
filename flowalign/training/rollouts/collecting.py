"""Sample, value and credit the rollouts of a run, and keep the state for later steps.

requests -> trajectories -> values -> credit -> advantages
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from jaxtyping import Float
from torch import Tensor

from flowalign.credit.critic import explained_variance
from flowalign.functional.advantage import favour_diversity, nearest_distance
from flowalign.rewards.composite import Rewards
from flowalign.rewards.objectives import TransformedValues
from flowalign.sampling.rollout import RolloutOutputs, concat_trajectories, sample
from flowalign.sampling.stepping import complete
from flowalign.training.learner import Learner
from flowalign.training.reference import unguided
from flowalign.training.rollouts.advantages import (
    AdvantageEstimate,
    AdvantageEstimator,
    mask_unused_rewards,
    outcome_credit,
)
from flowalign.training.rollouts.rollout_settings import RolloutSettings
from flowalign.training.rollouts.state_values import (
    NO_EXPERIENCE,
    CompletionValues,
    Experience,
    OutcomeHistory,
)
from flowalign.types import Policy, Request, StepCredit, Trajectory, ValueFunction
from flowalign.types.trajectory import CompletionRequest
from flowalign.utils.seeds import generator


def collect_rollouts(
    cfg: RolloutSettings,
    learner: Learner,
    rewards: Rewards,
    requests: Sequence[Request],
    seed: int,
    step: int,
    earlier: Experience = NO_EXPERIENCE,
    start: Tensor | None = None,
) -> CompletionValues:
    """Sample this rank's share of the requests, and return the values of the trajectories.

    If `rollout_batch_prompts` is smaller than the share, the rewards of one batch of prompts are
    computed while the next batch is sampled. `start` are initial noises instead of drawn ones.
    """
    local = learner.processes.share(range(len(requests)))
    size = cfg.rollout_batch_prompts or max(len(local), 1)
    batches = [local[start : start + size] for start in range(0, len(local), size)] or [local]
    starts = start.split(size * cfg.sampling.samples_per_prompt) if start is not None else ()
    drawn = (
        sample_prompts(cfg, learner.policy, requests, seed, step, batch, noise)
        for batch, noise in zip_longest(batches, starts)
    )
    if len(batches) == 1:
        return completion_values(cfg, learner, rewards, next(drawn), earlier)
    parts = []
    for trajectory in drawn:
        parts.append(completion_values(cfg, learner, rewards, trajectory))
        parts[-1].request([(trajectory.num_steps, cfg.completion), *trajectory.finished])
    whole = concat_trajectories([values.trajectory for values in parts])
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
    start: Tensor | None = None,
) -> Trajectory:
    """Return trajectories of some requests of a step.

    All ranks use the same window. The noise is `start`, or depends only on the position of the
    request.
    """
    # Noise is seeded by the request's position, so ranks and batches do not change the draws.
    window = cfg.window(step, generator(seed, "window", step))
    needs = cfg.requirements(window)
    precision = cfg.sampling.precision
    reduced = policy.network.reduce_precision(precision) if precision and policy.network else None
    with reduced or nullcontext():
        return sample(
            policy,
            [requests[i] for i in indices],
            cfg.sampling,
            window,
            [generator(seed, "noise", step, i) for i in indices],
            finish=[request for request in needs.requested if request[1].follows_rollout],
            keep=RolloutOutputs(
                states=cfg.kept_states(window),
                features=needs.observed,
                means=cfg.needs_means,
                graphs=cfg.keeps_graphs,
            ),
            start=start,
        )


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


class CreditedRollouts:
    """Rollouts of a run with their credit and advantages.

    State from earlier steps: their outcomes, the fitted critic, and the multipliers of reward
    thresholds.
    """

    def __init__(self, cfg: RolloutSettings, learner: Learner, rewards: Rewards, seed: int):
        self.cfg, self.learner, self.rewards, self.seed = cfg, learner, rewards, seed
        self.estimator = AdvantageEstimator(cfg.advantages, rewards, learner.processes)
        """Estimator of advantages, with reward weights that thresholds adapt."""
        length = cfg.requirements(cfg.window(0)).history if cfg.credit else 0
        self.history = OutcomeHistory(length)
        """Outcomes of earlier steps that the credit method uses."""
        self.critic = cfg.critic.start() if cfg.critic else None
        """Critic fitted to the outcomes of earlier steps."""

    @property
    def earlier(self) -> Experience:
        """Return the state from earlier steps that values read."""
        return Experience(self.critic, self.history)

    def sample(self, requests: Sequence[Request], step: int) -> CompletionValues:
        """Sample this process's share of the requests; return the values of the trajectories."""
        return collect_rollouts(
            self.cfg, self.learner, self.rewards, requests, self.seed, step, self.earlier
        )

    def estimate(
        self,
        values: CompletionValues,
        credit: StepCredit | None = None,
        chosen: Tensor | None = None,
    ) -> AdvantageEstimate:
        """Return the advantages of all processes; if `credit` is None, it is computed.

        `chosen` are the trained samples of this process, instead of those of `extremes`.
        """
        credit = compute_credit(self.cfg, values) if credit is None else credit
        trajectory = values.trajectory
        outcome = values([trajectory.num_steps])[:, 0]
        found = self.estimator.estimate(credit, outcome, trajectory.group_size, chosen)
        if not self.cfg.advantages.diversity:
            return found
        latents = trajectory.state(trajectory.num_steps).flatten(1)
        distance = nearest_distance(latents, trajectory.group_size).to(outcome.device)
        everywhere = self.learner.processes.gather(distance)
        return replace(found, advantage=favour_diversity(found.advantage, everywhere))

    def learn(
        self, requests: Sequence[Request], values: CompletionValues, estimate: AdvantageEstimate
    ) -> dict[str, float]:
        """Update history, multipliers and critic after a step.

        `requests` are the requests of all processes. Returns the metrics of the critic.
        """
        # Update only now: the credit and weights of a step must not depend on its own outcomes.
        outcome = estimate.gathered.outcome
        self.history.add([request.key for request in requests], outcome)
        self.estimator.learn(outcome)
        return self.learn_critic(values)

    def learn_critic(self, values: CompletionValues) -> dict[str, float]:
        """Fit the critic to the step's outcomes; return the explained variance before the fit.

        Predictions that were already used for credit do not change.
        """
        critic, trajectory, rewards = self.critic, values.trajectory, values.rewards
        if critic is None:
            return {}
        processes = self.learner.processes
        outcome = processes.gather(
            _transform_values(self.cfg, values)([trajectory.num_steps])[:, 0]
        )
        usable = rewards.usable(outcome.isfinite())
        outcome = outcome[usable].nan_to_num()
        group = processes.gather(trajectory.prompt + (processes.rank << 40))[usable]
        features = {
            k: processes.gather(trajectory.features(k))[usable] for k in sorted(trajectory.hidden)
        }
        if not len(outcome):
            return {}
        foreseen = {
            k: critic.predict(k, x, group, len(rewards.dims)) @ rewards.weights
            for k, x in features.items()
        }
        self.critic, total = critic.update(features, outcome, group), outcome @ rewards.weights
        return {
            f"critic/explained_variance_{k}": explained_variance(value, total, group)
            for k, value in foreseen.items()
        }

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values."""
        return {
            **self.estimator.state(),
            "history": self.history.state(),
            "critic": self.critic and self.critic.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.estimator.restore(state)
        self.history.restore(state["history"])
        if self.critic and state["critic"]:
            self.critic = self.critic.restore(state["critic"])


def compute_credit(cfg: RolloutSettings, values: CompletionValues) -> StepCredit:
    """Return the credit of this process's transitions, after computing the required values.

    Without a credit method, the outcomes are the credit, in one column.
    """
    trajectory, transformed = values.trajectory, _transform_values(cfg, values)
    if cfg.credit is not None:
        credit = cfg.credit(trajectory, transformed)
    else:
        last = transformed([trajectory.num_steps])[:, 0]
        credit = outcome_credit(last, trajectory.group_size)
    used = mask_unused_rewards(credit.value, values.rewards.dims, trajectory.requests)
    return replace(credit, value=used)


def _transform_values(cfg: RolloutSettings, values: CompletionValues) -> ValueFunction:
    transform = cfg.advantages.value_transform
    if transform is None:
        return values
    return TransformedValues(values, values.rewards.dims, transform, values.trajectory)
