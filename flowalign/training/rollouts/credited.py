"""Sample, value and credit the rollouts of a run, and keep the state for later steps.

requests -> trajectories -> values -> credit -> advantages
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flowalign.credit.critic import explained_variance
from flowalign.functional.advantage import favour_diversity, nearest_distance
from flowalign.rewards.composite import Rewards
from flowalign.rewards.objectives import TransformedValues
from flowalign.training.learner import Learner
from flowalign.training.rollouts.advantages import (
    AdvantageEstimate,
    AdvantageEstimator,
    mask_unused_rewards,
    outcome_credit,
)
from flowalign.training.rollouts.collecting import collect_rollouts
from flowalign.training.rollouts.rollout_settings import RolloutSettings
from flowalign.training.rollouts.state_values import CompletionValues, Experience, OutcomeHistory
from flowalign.types import Request, StepCredit


class CreditedRollouts:
    """Rollouts of a run with their credit and advantages.

    State from earlier steps: their outcomes, the fitted critic, and the multipliers of reward
    thresholds.
    """

    def __init__(self, cfg: RolloutSettings, learner: Learner, rewards: Rewards, seed: int):
        self.cfg, self.learner, self.rewards, self.seed = cfg, learner, rewards, seed
        self.estimator = AdvantageEstimator(cfg.advantages, rewards, learner.processes)
        """Estimator of advantages, with reward weights that thresholds adapt."""
        self.history = OutcomeHistory(cfg.history)
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
        self, values: CompletionValues, credit: StepCredit | None = None
    ) -> AdvantageEstimate:
        """Return the advantages of all processes; if `credit` is None, it is computed."""
        credit = compute_credit(self.cfg, values) if credit is None else credit
        trajectory = values.trajectory
        outcome = values([trajectory.num_steps])[:, 0]
        found = self.estimator.estimate(credit, outcome, trajectory.group_size)
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


def _transform_values(cfg: RolloutSettings, values: CompletionValues) -> TransformedValues:
    transform = cfg.advantages.value_transform
    return TransformedValues(values, values.rewards.dims, transform, values.trajectory)
