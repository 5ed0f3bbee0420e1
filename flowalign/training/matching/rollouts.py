"""Make preference pairs from the policy's samples (online DPO): sample, score, pair, train."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from flowalign.data.preference.pair_rules import BestWorst, Rule
from flowalign.data.requests import Requests, read_requests
from flowalign.distributed.processes import Processes
from flowalign.rewards.checked import OnFailure
from flowalign.rewards.composite import Rewards
from flowalign.sampling.inference import generate
from flowalign.training.learner import Learner
from flowalign.training.matching.source import Batch, BatchStream, DataSource, StreamContext
from flowalign.training.plan_rows import check_prompts_per_step, reward_rows, samples_row
from flowalign.training.recipe import RecipePlan, RunContext
from flowalign.training.rollouts.advantage_config import AdvantageConfig
from flowalign.training.rollouts.advantages import (
    AdvantageEstimate,
    AdvantageEstimator,
    mask_unused_rewards,
    outcome_credit,
)
from flowalign.training.training_prompts import TrainingPrompts
from flowalign.types import Examples, Label, ModelPlan, Policy, Request, encode_requests
from flowalign.types.ranges import DenoisingSteps, GroupSize, PositiveInt, require_ranges
from flowalign.utils.seeds import generator
from flowalign.utils.stages import stage


@dataclass(frozen=True, kw_only=True)
class Rollouts(TrainingPrompts, DataSource):
    """Pairs of deterministic samples of the policy, chosen by weighted rewards."""

    key: ClassVar[str] = "recipe.data"
    """Key of the settings in run files, for messages."""

    prompts_per_step: PositiveInt = 16
    """Number of prompts per step, over all processes."""
    samples_per_prompt: GroupSize = 8
    """Number K of samples per prompt from which pairs are chosen, at least 2."""
    num_steps: DenoisingSteps = 10
    """Number of denoising steps of the sampler."""
    rule: Rule = field(default_factory=BestWorst)
    """Rule that chooses pairs from the samples of a prompt."""
    micro_batch: PositiveInt = 64
    """Number of samples per network call, decode and reward call."""
    advantages: AdvantageConfig = field(
        default_factory=lambda: AdvantageConfig(scale="given", clip=None)
    )
    """Comparison of the samples of a prompt. By default rewards are not normalised, so a rule's
    `min_gap` has the unit of the weighted reward."""
    on_failed_reward: OnFailure = "raise"
    """Action after a failed reward. raise: the run ends. drop_sample: samples without a reward are
    not paired. drop_group: the other samples of the prompt are not paired either."""

    def __post_init__(self) -> None:
        """Reject settings outside their ranges, and groups that cannot be compared."""
        require_ranges(self, self.key)
        if self.samples_per_prompt < 2:
            raise ValueError(
                f"{self.key}.samples_per_prompt is {self.samples_per_prompt}; "
                "a pair takes at least 2"
            )
        self.advantages.check_groups(self.key, self.samples_per_prompt)
        self.advantages.refuse_extremes(self.key, f"{self.key}.rule chooses the samples")

    @property
    @override
    def paired(self) -> bool:
        return True

    @property
    @override
    def provides(self) -> Set[Label]:
        return {"labels"}

    @property
    @override
    def examples_per_step(self) -> int:
        """Return the largest number of pairs, which is reached if no samples are tied."""
        return self.prompts_per_step * self.rule.most(self.samples_per_prompt)

    @override
    def check(self, run: RunContext) -> None:
        """Raise ValueError if there is no weighted reward to compare samples by."""
        if not run.rewards.weights.any():
            raise ValueError(
                "recipe.data of class Rollouts pairs samples by rewards: name reward models in "
                "rewards, and give at least one of their dimensions a weight"
            )
        self.advantages.check(self.key, run, self.prompts)

    @override
    def plan(self, run: RunContext, model: ModelPlan, world: int) -> RecipePlan:
        samples = self.prompts_per_step * self.samples_per_prompt
        evaluations = samples * self.num_steps * run.policy.evaluations_per_velocity
        rows = {
            **samples_row(self.prompts_per_step, self.samples_per_prompt),
            "pairs per step": f"at most {self.examples_per_step}",
            "sampling evaluations per step": f"{evaluations}",
            "decodes per step": f"{samples}",
            **reward_rows(run.rewards.models, [self.samples_per_prompt] * self.prompts_per_step),
        }
        return RecipePlan(rows=rows, prompts_per_step=self.prompts_per_step)

    @override
    def open(self, learner: Learner, context: StreamContext) -> "RolloutStream":
        """Return the stream, which samples each batch at its step.

        Raises:
            ValueError: There are fewer prompts per step than processes.
        """
        check_prompts_per_step(self.key, self.prompts_per_step, learner.processes.world)
        rewards = replace(context.rewards, on_failure=self.on_failed_reward)
        return RolloutStream(
            self,
            learner.policy,
            rewards,
            Requests(read_requests(self.prompts), context.seed, context.conditioning),
            learner.processes,
        )


class RolloutStream(BatchStream):
    """Stream of pairs from samples of the current policy."""

    def __init__(
        self,
        cfg: Rollouts,
        policy: Policy,
        rewards: Rewards,
        requests: Requests,
        processes: Processes,
    ):
        self.cfg, self.policy, self.rewards, self.requests = cfg, policy, rewards, requests
        self.seed, self.processes = requests.seed, processes
        self.estimator = AdvantageEstimator(cfg.advantages, rewards, processes)

    @override
    def state(self) -> dict[str, Any]:
        return self.estimator.state()

    @override
    def restore(self, state: Mapping[str, Any]) -> None:
        self.estimator.restore(state)

    @override
    def batch(self, step: int) -> Batch:
        cfg, requests = self.cfg, self.requests.batch(step, self.cfg.prompts_per_step)
        local = list(self.processes.share(range(len(requests))))
        asked = [requests[i] for i in local]
        latents, scores = self._sample(step, asked, local)
        estimate = self._estimate(scores, asked)
        total = estimate.advantage.masked_fill(~estimate.train_mask, torch.nan)
        weights = self.estimator.weights
        better = scores[:, weights != 0] * weights[weights != 0].sign()
        sides = [
            cfg.rule.pairs(values, value)
            for values, value in zip(
                better.split(cfg.samples_per_prompt),
                total[estimate.gathered.local, 0].split(cfg.samples_per_prompt),
                strict=True,
            )
        ]
        examples = self._pair(latents, scores, asked, sides)
        counts = self.processes.gather(torch.tensor([len(examples.latents) // 2]))
        first = int(counts[: self.processes.rank].sum())
        metrics = {**estimate.metrics, "pairs": float(counts.sum())}
        self.estimator.learn(estimate.gathered.outcome)
        return Batch(examples, first, int(counts.sum()), metrics)

    def _estimate(
        self, scores: Float[Tensor, "n R"], requests: Sequence[Request]
    ) -> AdvantageEstimate:
        """Return the advantages of the transformed rewards, compared over all processes."""
        size, transform, value = (
            self.cfg.samples_per_prompt,
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
        cfg, copies = self.cfg, range(self.cfg.samples_per_prompt)
        repeated = [request for request in requests for _ in copies]
        seeds = [generator(self.seed, "rollout", step, i, k) for i in places for k in copies]
        policy = self.policy
        latents = generate(policy, repeated, cfg.num_steps, seeds, cfg.micro_batch)
        scoring = self.rewards.scoring()
        groups = [i for i in places for _ in copies]
        for start in range(0, len(repeated), cfg.micro_batch):
            part = slice(start, start + cfg.micro_batch)
            with stage("decode"):
                media = policy.decode(latents[part]).cpu()
            self.rewards.costs.decodes += len(media)
            scoring.add(self.rewards.batch(media, repeated[part], groups[part], policy.fps))
        output = scoring.result()
        if cfg.on_failed_reward == "raise":
            self.rewards.require(output, lambda i: f"sample {i}, prompt {repeated[i].prompt!r}")
        return latents, output.values.float()

    def _pair(
        self,
        latents: Float[Tensor, "n *latent"],
        scores: Float[Tensor, "n R"],
        requests: Sequence[Request],
        found: Sequence[tuple[Int[Tensor, "_"], Int[Tensor, "_"]]],
    ) -> Examples:
        """Return the winners of all requests, then their losers."""
        starts = range(0, len(latents), self.cfg.samples_per_prompt)
        offset = zip(found, starts, strict=True)
        winners, losers = (
            torch.cat([side + start for side, start in zip(sides, starts, strict=True)])
            for sides in zip(*(pair for pair, _ in offset), strict=True)
        )
        rows = torch.cat([winners, losers])
        owner = (rows // self.cfg.samples_per_prompt).to(latents.device)
        cond = encode_requests(self.policy, requests)
        return Examples(
            latents=latents[rows.to(latents.device)],
            cond={name: value[owner] for name, value in cond.items()},
            paired=True,
            weight=torch.ones(len(rows)),
            desirable=torch.arange(len(rows)) < len(winners),
            scores=dict(zip(self.rewards.dims, scores[rows].unbind(1), strict=True)),
        )
