"""Sample and score groups at each step, and compare the samples of a group."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import override

from flowalign.data.requests import Requests
from flowalign.functional.maps import mean_one, on_grid
from flowalign.rewards.composite import Rewards
from flowalign.sampling.completion import take
from flowalign.sampling.rollout import encode_once
from flowalign.training.learner import Learner
from flowalign.training.matching.source import Batch, BatchStream, StepAdvantages
from flowalign.training.rollouts.advantages import (
    chosen_transitions,
    compute_advantages,
    compute_credit,
    credit_metrics,
    gather_credit,
)
from flowalign.training.rollouts.collecting import collect_rollouts
from flowalign.training.rollouts.comparison import RewardComparison
from flowalign.training.rollouts.critics import learned
from flowalign.training.rollouts.outcome_history import OutcomeHistory
from flowalign.training.rollouts.settings import RolloutSettings
from flowalign.training.rollouts.state_values import CompletionValues
from flowalign.types import Cond, Examples, Request, Trajectory

CompletedStates = Callable[[Sequence[int]], Mapping[int, int]]
"""Maps trained steps to the states whose completions their credit rests on."""


class ScoredStream(BatchStream):
    """Samples groups at each step, by the weights of the policy or of an average as they are then.

    Samples that are not trained, because a reward failed or others are compared, are no examples.
    """

    def __init__(
        self,
        cfg: RolloutSettings,
        learner: Learner,
        rewards: Rewards,
        requests: Requests,
        weights: str,
        completed: CompletedStates | None = None,
        weight_map: str | None = None,
    ):
        self.cfg, self.learner, self.rewards = cfg, learner, rewards
        self.requests, self.weights, self.completed = requests, weights, completed
        self.weight_map = weight_map
        self.comparison = RewardComparison(cfg, rewards, learner.processes)
        """Comparison of credit, by weights that thresholds change."""
        self.history = OutcomeHistory(cfg.history)
        """Outcomes of earlier steps that the credit method compares with."""
        self.critic = cfg.critic.start() if cfg.critic else None
        """What the critic has learned from the outcomes of earlier steps."""

    @override
    def batches(self, steps: Iterable[int]) -> Iterator[Batch]:
        """Sample each batch at its step."""
        for step in steps:
            yield self._batch(step)

    @override
    def held_out(self) -> Examples | None:
        """Return None: samples age with the policy that made them."""
        return None

    @override
    def state(self) -> dict[str, Any]:
        return {
            **self.comparison.state(),
            "history": self.history.state(),
            "critic": self.critic and self.critic.state(),
        }

    @override
    def restore(self, state: Mapping[str, Any]) -> None:
        self.comparison.restore(state)
        self.history.restore(state["history"])
        if self.critic and state["critic"]:
            self.critic = self.critic.restored(state["critic"])

    def _batch(self, step: int) -> Batch:
        cfg, processes = self.cfg, self.learner.processes
        requests = self.requests.batch(step, cfg.prompts_per_step)
        with self._sampling_weights():
            values = self._values(requests, step)
            credit = compute_credit(cfg, values)
            gathered = gather_credit(self.comparison, values, credit)
        self.history.add([request.key for request in requests], gathered.outcome)
        advantage = compute_advantages(cfg, self.comparison, gathered.credit)
        chosen = chosen_transitions(cfg, gathered, advantage)
        metrics = credit_metrics(self.comparison, gathered, advantage)
        metrics["samples_dropped"] = float((~chosen.any(1)).sum())
        self.comparison.learn(gathered.outcome)
        if self.critic is not None:
            self.critic, found = learned(cfg, self.critic, processes, values)
            metrics |= found
        start = gathered.rank_offset
        local = slice(start, start + len(values.trajectory.requests))
        kept = chosen[local].any(1).nonzero()[:, 0]
        examples = self._examples(values, kept, len(requests))
        first, total = int(chosen[:start].any(1).sum()), int(chosen.any(1).sum())
        mine, trained = advantage[local][kept], chosen[local][kept]
        if cfg.credit is None:
            return Batch(_with_advantages(examples, mine[:, 0]), first, total, metrics)
        steps = self._step_advantages(values.trajectory, kept, mine, trained)
        return Batch(examples, first, total, metrics, steps)

    def _values(self, requests: Sequence[Request], step: int) -> CompletionValues:
        """Sample this rank's share of the requests, and return the values of their states."""
        seed = self.requests.seed
        values = collect_rollouts(
            self.cfg, self.learner, self.rewards, requests, seed, step, self.critic
        )
        values.history = self.history
        return values

    def _sampling_weights(self) -> AbstractContextManager[None]:
        """Set the policy to the weights that sample, while the context is open."""
        if self.weights == "policy":
            return nullcontext()
        return self.learner.averaged(self.weights)

    def _examples(
        self, values: CompletionValues, kept: Int[Tensor, "n"], num_requests: int
    ) -> Examples:
        """Return the kept samples with conditioning, groups and rewards."""
        trajectory, dims = values.trajectory, self.rewards.dims
        latents = trajectory.state(trajectory.num_steps, kept)
        prompt = trajectory.prompt[kept]
        places = torch.tensor(list(self.learner.processes.share(range(num_requests))))
        scores = values([trajectory.num_steps])[kept, 0]
        return Examples(
            latents=latents,
            cond=self._cond(trajectory, kept, scores),
            paired=False,
            weight=torch.ones(len(kept)),
            desirable=torch.ones(len(kept), dtype=torch.bool),
            scores=dict(zip(dims, scores.unbind(1), strict=True)),
            group=places[prompt],
            weight_map=self._weights_of_places(values, kept, latents),
        )

    def _weights_of_places(
        self, values: CompletionValues, kept: Int[Tensor, "n"], latents: Float[Tensor, "n *latent"]
    ) -> Float[Tensor, "n *map"] | None:
        """Return the map of each kept sample on the grid of its latent, scaled to mean 1."""
        if self.weight_map is None:
            return None
        maps = values.outcome_map(self.weight_map)[kept]
        return mean_one(on_grid(maps, tuple(latents.shape[2:]))).to(latents.device)

    def _cond(
        self, trajectory: Trajectory, kept: Int[Tensor, "n"], scores: Float[Tensor, "n R"]
    ) -> Cond:
        """Return the conditioning under which kept samples are learned: as asked, or as scored."""
        asked = [trajectory.requests[i] for i in kept.tolist()]
        dressing, dims, learned = self.requests.dressing, self.rewards.dims, asked
        if dressing:
            known = (dict(zip(dims, row, strict=True)) for row in scores.tolist())
            learned = [dressing.at_training(*each) for each in zip(asked, known, strict=True)]
        if [r.given for r in learned] == [r.given for r in asked]:
            return take(trajectory.cond, trajectory.prompt[kept].to(trajectory.device))
        cond, row = encode_once(self.learner.policy, learned)
        return take(cond, row.to(trajectory.device))

    def _step_advantages(
        self,
        trajectory: Trajectory,
        kept: Int[Tensor, "n"],
        advantage: Float[Tensor, "n T"],
        trained: Bool[Tensor, "n T"],
    ) -> StepAdvantages:
        """Return what the steps of the kept samples earned, and the completions it rests on."""
        steps = trajectory.trained.any(0).nonzero()[:, 0].tolist()
        states = self.completed(steps) if self.completed else {}
        completed = {k: _completion(trajectory, j, self.cfg)[kept] for k, j in states.items()}
        return StepAdvantages(trajectory.sigmas.cpu(), advantage, trained, completed)


def _completion(trajectory: Trajectory, k: int, cfg: RolloutSettings) -> Float[Tensor, "B *latent"]:
    """Return the clean latent that state k of every sample was completed to, on the CPU."""
    if k == trajectory.num_steps:
        return trajectory.state(k).cpu()
    return trajectory.rows.expand(trajectory.finished[k, cfg.completion].cpu(), k)


def _with_advantages(examples: Examples, advantage: Float[Tensor, "n"]) -> Examples:
    return replace(examples, advantage=advantage, desirable=advantage > 0)
