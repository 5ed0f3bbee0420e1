"""Pair samples of the policy for online DPO, by their outcomes or by the credit of each step.

requests -> trajectories -> credit -> advantages -> pairs of each step, with weights
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import override

from flowalign.data.preference.preference_data import Rule
from flowalign.sampling.inference import generate
from flowalign.sampling.rollout import empty_trajectory
from flowalign.training.matching.noising import pairs_of
from flowalign.training.matching.source import CreditedStream, StepAdvantages, StepExamples
from flowalign.training.rollouts.advantages import AdvantageEstimate
from flowalign.training.rollouts.collecting import completion_values, compute_credit
from flowalign.training.rollouts.state_values import CompletionValues
from flowalign.types import Batch, Request, StepCredit, encode_requests
from flowalign.types.trajectory import take_rows
from flowalign.utils.seeds import generator

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

    Samples that meet at several steps in the same order are one pair. The pairs of a prompt are
    consecutive, in the order of the rule or, for several steps, of their winners' rows. `credit`
    holds dimensions in which higher is better. Source: SPO, arXiv:2406.04314, pairs siblings of
    equal steps; other rules, groups and credit methods are our choice.
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
    pairs = [*gaps] if mask.shape[1] == 1 else sorted(gaps)
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
class PairStream(CreditedStream):
    """Stream of pairs of the current policy's samples, which are deterministic without credit."""

    rule: Rule
    step_weight: StepWeighting

    @override
    def batch(self, step: int) -> StepExamples:
        requests = self.requests.batch(step, self.cfg.prompts_per_step)
        credited, processes = self.cfg.credit is not None, self.learner.processes
        sample = self.rollouts.sample if credited else self._generate
        values = sample(requests, step)
        credit = compute_credit(self.cfg, values)
        estimate = self.rollouts.estimate(values, credit)
        pairs = self._pairs(credit, estimate)
        metrics = {**estimate.metrics, **self.rollouts.learn(requests, values, estimate)}
        gap, examples = pairs.gap, self._examples(values, pairs)
        counts = processes.gather(torch.tensor([[len(gap), (gap > 0).sum()]]))
        first, (total, trained) = int(counts[: processes.rank, 0].sum()), counts.sum(0).tolist()
        metrics["pairs"] = float(total)
        if not credited:
            return StepExamples(examples, first, total, metrics)
        mean = float(processes.gather(gap.sum()[None]).sum()) / max(trained, 1)
        metrics |= {**estimate.size_metrics, "pair_steps": float(trained), "pair_gap": mean}
        weight = weigh_gaps(gap, mean, self.step_weight)
        sigmas = values.trajectory.sigmas.cpu()
        steps = StepAdvantages(sigmas, None, gap > 0, weight=weight)
        return StepExamples(examples, first, total, metrics, steps)

    def _generate(self, requests: Sequence[Request], step: int) -> CompletionValues:
        """Return the values of samples, each drawn from noise of its own."""
        cfg, policy, seed = self.cfg.sampling, self.learner.policy, self.requests.seed
        places = self.learner.processes.share(range(len(requests)))
        asked, copies = [requests[i] for i in places], range(cfg.samples_per_prompt)
        draws = [generator(seed, "rollout", step, i, k) for i in places for k in copies]
        empty = empty_trajectory(cfg, (), asked, policy.schedule(cfg.num_steps))
        latents = generate(policy, empty.requests, cfg.num_steps, draws, cfg.micro_batch)
        trajectory = replace(
            empty, cond=encode_requests(policy, asked), states={cfg.num_steps: latents}
        )
        return completion_values(self.cfg, self.learner, self.rewards, trajectory)

    def _pairs(self, credit: StepCredit, estimate: AdvantageEstimate) -> StepPairs:
        """Return the pairs of this process's samples."""
        weights, local = self.rollouts.estimator.weights, estimate.gathered.local
        better = credit.value[..., weights != 0] * weights[weights != 0].sign()
        advantage, mask = estimate.advantage[local], estimate.train_mask[local]
        return pair_steps(self.rule, better, advantage, credit.group, mask)

    def _examples(self, values: CompletionValues, pairs: StepPairs) -> Batch:
        """Return the winners, then the losers."""
        rows, trajectory = torch.cat([pairs.winner, pairs.loser]), values.trajectory
        scores = values([trajectory.num_steps])[rows, 0].float()
        return pairs_of(
            {
                "latents": trajectory.state(trajectory.num_steps, rows),
                "cond": take_rows(trajectory.cond, trajectory.prompt[rows].to(trajectory.device)),
                "scores": dict(zip(self.rewards.dims, scores.unbind(1), strict=True)),
            }
        )
