"""Pair samples of the policy for online DPO, by their outcomes or by the credit of each step.

requests -> samples -> rewards -> pairs
requests -> trajectories -> credit -> advantages -> pairs of each step, with weights
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import override

from flowalign.data.preference.preference_data import Rule
from flowalign.data.requests import Requests
from flowalign.rewards.composite import Rewards
from flowalign.sampling.inference import generate
from flowalign.training.learner import Learner
from flowalign.training.matching.noising import num_examples, pairs_of
from flowalign.training.matching.source import (
    BatchStream,
    CreditedStream,
    StepAdvantages,
    StepExamples,
)
from flowalign.training.rollouts.advantages import (
    AdvantageEstimate,
    AdvantageEstimator,
    mask_unused_rewards,
    outcome_credit,
)
from flowalign.training.rollouts.collecting import compute_credit
from flowalign.training.rollouts.rollout_settings import RolloutSettings
from flowalign.types import Batch, Request, StepCredit, Trajectory, encode_requests
from flowalign.types.trajectory import take_rows
from flowalign.utils.costs import stage
from flowalign.utils.seeds import generator


class OutcomePairStream(BatchStream):
    """Stream of pairs from deterministic samples of the current policy."""

    def __init__(
        self,
        cfg: RolloutSettings,
        learner: Learner,
        rewards: Rewards,
        requests: Requests,
        rule: Rule,
    ):
        self.cfg, self.rewards, self.requests = cfg, rewards, requests
        self.policy, self.processes, self.rule = learner.policy, learner.processes, rule
        self.estimator = AdvantageEstimator(cfg.advantages, rewards, learner.processes)

    @override
    def state(self) -> dict[str, Any]:
        return self.estimator.state()

    @override
    def restore(self, state: Mapping[str, Any]) -> None:
        self.estimator.restore(state)

    @override
    def batch(self, step: int) -> StepExamples:
        cfg, requests = self.cfg, self.requests.batch(step, self.cfg.prompts_per_step)
        local = list(self.processes.share(range(len(requests))))
        asked = [requests[i] for i in local]
        latents, scores = self._sample(step, asked, local)
        estimate = self._estimate(scores, asked)
        total = estimate.advantage.masked_fill(~estimate.train_mask, torch.nan)
        weights = self.estimator.weights
        better = scores[:, weights != 0] * weights[weights != 0].sign()
        sides = [
            self.rule.pairs(values, value)
            for values, value in zip(
                better.split(cfg.sampling.samples_per_prompt),
                total[estimate.gathered.local, 0].split(cfg.sampling.samples_per_prompt),
                strict=True,
            )
        ]
        examples = self._pair(latents, scores, asked, sides)
        counts = self.processes.gather(torch.tensor([num_examples(examples)]))
        first = int(counts[: self.processes.rank].sum())
        metrics = {**estimate.metrics, "pairs": float(counts.sum())}
        self.estimator.learn(estimate.gathered.outcome)
        return StepExamples(examples, first, int(counts.sum()), metrics)

    def _estimate(
        self, scores: Float[Tensor, "n R"], requests: Sequence[Request]
    ) -> AdvantageEstimate:
        """Return the advantages of the transformed rewards, compared over all processes."""
        size, transform, value = (
            self.cfg.sampling.samples_per_prompt,
            self.cfg.advantages.value_transform,
            scores,
        )
        of_each = [request for request in requests for _ in range(size)]
        if transform:
            value = transform(scores, self.rewards.dims, of_each)
        value = mask_unused_rewards(value, self.rewards.dims, of_each)
        return self.estimator.estimate(outcome_credit(value, size), scores, size)

    def _sample(
        self, step: int, requests: Sequence[Request], places: Sequence[int]
    ) -> tuple[Float[Tensor, "n *latent"], Float[Tensor, "n R"]]:
        """Return K samples of each request, and all their rewards."""
        cfg, policy, copies = self.cfg, self.policy, range(self.cfg.sampling.samples_per_prompt)
        repeated = [request for request in requests for _ in copies]
        seed, size = self.requests.seed, cfg.sampling.micro_batch
        seeds = [generator(seed, "rollout", step, i, k) for i in places for k in copies]
        latents = generate(policy, repeated, cfg.sampling.num_steps, seeds, size)
        scoring = self.rewards.scoring()
        groups = [i for i in places for _ in copies]
        for start in range(0, len(repeated), size):
            part = slice(start, start + size)
            with stage("decode"):
                batch = self.rewards.decode(policy, latents[part], repeated[part], groups[part])
            self.rewards.costs.decodes += len(batch)
            scoring.add(batch)
        output = scoring.result()
        if self.rewards.on_failure == "raise":
            self.rewards.require(output, lambda i: f"sample {i}, prompt {repeated[i].prompt!r}")
        return latents, output.values.float()

    def _pair(
        self,
        latents: Float[Tensor, "n *latent"],
        scores: Float[Tensor, "n R"],
        requests: Sequence[Request],
        found: Sequence[tuple[Int[Tensor, "_"], Int[Tensor, "_"]]],
    ) -> Batch:
        """Return the winners of all requests, then their losers."""
        starts = range(0, len(latents), self.cfg.sampling.samples_per_prompt)
        offset = zip(found, starts, strict=True)
        winners, losers = (
            torch.cat([side + start for side, start in zip(sides, starts, strict=True)])
            for sides in zip(*(pair for pair, _ in offset), strict=True)
        )
        rows = torch.cat([winners, losers])
        owner = (rows // self.cfg.sampling.samples_per_prompt).to(latents.device)
        cond = encode_requests(self.policy, requests)
        return pairs_of(
            {
                "latents": latents[rows.to(latents.device)],
                "cond": {name: value[owner] for name, value in cond.items()},
                "scores": dict(zip(self.rewards.dims, scores[rows].unbind(1), strict=True)),
            }
        )


StepWeighting = Literal["gap", "equal"]
"""Weights of the pairs of a step. gap: lead of the winner's advantage, divided by the mean lead of
the batch. equal: 1."""


@dataclass(frozen=True)
class StepPairs:
    """Pairs of samples, and the denoising steps that each pair is trained at."""

    winner: Int[Tensor, "m"]
    """Row of the better sample of each pair."""
    loser: Int[Tensor, "m"]
    """Row of the worse sample of each pair."""
    gap: Float[Tensor, "m T"]
    """Lead of the winner's advantage at each step; 0 where the pair is not trained."""


def pair_steps(
    rule: Rule,
    credit: Float[Tensor, "n T R"],
    advantage: Float[Tensor, "n T"],
    group: Int[Tensor, "n T"],
    mask: Bool[Tensor, "n T"],
) -> StepPairs:
    """Pair the transitions of each step within their groups by `rule`.

    Samples that meet at several steps in the same order are one pair. Pairs are sorted by their
    winner's row, so the pairs of a prompt are consecutive. `credit` holds dimensions
    in which higher is better. Source: SPO, arXiv:2406.04314, pairs siblings of equal steps; other
    rules, groups and credit methods are our choice.
    """
    gaps: dict[tuple[int, int], Tensor] = {}
    for k in range(mask.shape[1]):
        for label in group[mask[:, k], k].unique():
            rows = (mask[:, k] & (group[:, k] == label)).nonzero()[:, 0]
            sides = rule.pairs(credit[rows, k], advantage[rows, k])
            for winner, loser in zip(*(rows[side].tolist() for side in sides), strict=True):
                gap = gaps.setdefault((winner, loser), advantage.new_zeros(mask.shape[1]))
                gap[k] = advantage[winner, k] - advantage[loser, k]
    # Noise depends on a pair's position, so the order must not depend on the number of processes.
    pairs = sorted(gaps)
    winners, losers = torch.tensor(pairs, dtype=torch.long).view(-1, 2).unbind(1)
    none = advantage.new_zeros(0, mask.shape[1])
    return StepPairs(winners, losers, torch.stack([gaps[p] for p in pairs]) if pairs else none)


def count_pairs(rule: Rule, group: Int[Tensor, "n T"], mask: Bool[Tensor, "n T"]) -> int:
    """Return the largest number of pairs over all steps and groups."""
    columns = zip(group.unbind(1), mask.unbind(1), strict=True)
    sizes = [some[on].unique(return_counts=True)[1].tolist() for some, on in columns]
    return sum(rule.most(size) for step in sizes for size in step)


def weigh_gaps(gap: Float[Tensor, "m T"], mean: float, how: StepWeighting) -> Float[Tensor, "m T"]:
    """Return the weight of each pair at each step, 0 where the gap is 0.

    `mean` is the mean gap over the pairs and steps of all processes, so gap weights have mean 1.
    """
    return (gap > 0).to(gap) if how == "equal" or not mean else gap / mean


@dataclass(eq=False)
class StepPairStream(CreditedStream):
    """Stream of pairs from credited rollouts of the current policy."""

    rule: Rule
    step_weight: StepWeighting

    @override
    def batch(self, step: int) -> StepExamples:
        requests = self.requests.batch(step, self.cfg.prompts_per_step)
        values, processes = self.rollouts.sample(requests, step), self.learner.processes
        credit = compute_credit(self.cfg, values)
        estimate = self.rollouts.estimate(values, credit)
        pairs = self._pairs(credit, estimate)
        metrics = {**estimate.metrics, **estimate.size_metrics}
        metrics |= self.rollouts.learn(requests, values, estimate)
        trajectory, gap = values.trajectory, pairs.gap
        counts = processes.gather(torch.tensor([[len(gap), (gap > 0).sum()]]))
        first, (total, trained) = int(counts[: processes.rank, 0].sum()), counts.sum(0).tolist()
        mean = float(processes.gather(gap.sum()[None]).sum()) / max(trained, 1)
        metrics |= {"pairs": float(total), "pair_steps": float(trained), "pair_gap": mean}
        scores = values([trajectory.num_steps])[:, 0]
        examples = self._examples(trajectory, pairs, scores)
        weight = weigh_gaps(gap, mean, self.step_weight)
        steps = StepAdvantages(trajectory.sigmas.cpu(), None, gap > 0, weight=weight)
        return StepExamples(examples, first, total, metrics, steps)

    def _pairs(self, credit: StepCredit, estimate: AdvantageEstimate) -> StepPairs:
        """Return the pairs of this process's samples."""
        weights, local = self.rollouts.estimator.weights, estimate.gathered.local
        better = credit.value[..., weights != 0] * weights[weights != 0].sign()
        advantage, mask = estimate.advantage[local], estimate.train_mask[local]
        return pair_steps(self.rule, better, advantage, credit.group, mask)

    def _examples(
        self, trajectory: Trajectory, pairs: StepPairs, scores: Float[Tensor, "n R"]
    ) -> Batch:
        """Return the winners, then the losers."""
        rows, dims = torch.cat([pairs.winner, pairs.loser]), self.rewards.dims
        return pairs_of(
            {
                "latents": trajectory.state(trajectory.num_steps, rows),
                "cond": take_rows(trajectory.cond, trajectory.prompt[rows].to(trajectory.device)),
                "scores": dict(zip(dims, scores[rows].float().unbind(1), strict=True)),
            }
        )
