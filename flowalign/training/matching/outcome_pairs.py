"""Pair deterministic samples by their rewards, for online DPO.

requests -> samples -> rewards -> pairs
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from flowalign.data.preference.preference_data import Rule
from flowalign.data.requests import Requests
from flowalign.rewards.composite import Rewards
from flowalign.sampling.inference import generate
from flowalign.training.learner import Learner
from flowalign.training.matching.example_parts import num_examples, pairs_of
from flowalign.training.matching.source import BatchStream, StepExamples
from flowalign.training.rollouts.advantages import (
    AdvantageEstimate,
    AdvantageEstimator,
    mask_unused_rewards,
    outcome_credit,
)
from flowalign.training.rollouts.rollout_settings import RolloutSettings
from flowalign.types import Batch, Request, encode_requests
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
