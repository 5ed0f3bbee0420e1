"""Make preference pairs from the policy's samples (online DPO): sample, score, pair, train.

requests -> trajectories -> credit -> advantages -> pairs, of each step if there is credit
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import override

from flowalign.credit.critic import Critic
from flowalign.data.preference.preference_data import BestWorst, Rule
from flowalign.data.requests import Requests, read_requests
from flowalign.rewards.checked import OnFailure
from flowalign.sampling.inference import generate
from flowalign.sampling.rollout import empty_trajectory
from flowalign.sampling.sampling_settings import StochasticSampling
from flowalign.sampling.sde_windows import NoSteps
from flowalign.training.learner import Learner
from flowalign.training.matching.noising import pairs_of
from flowalign.training.matching.source import (
    CreditedStream,
    DataSource,
    StepAdvantages,
    StepExamples,
    StreamContext,
)
from flowalign.training.recipe import (
    RecipePlan,
    RunContext,
    TrainingPrompts,
    check_prompts_per_step,
)
from flowalign.training.rollouts.advantage_config import AdvantageConfig
from flowalign.training.rollouts.advantages import AdvantageEstimate
from flowalign.training.rollouts.collecting import completion_values, compute_credit
from flowalign.training.rollouts.rollout_plan import plan_credited
from flowalign.training.rollouts.rollout_settings import SEVERAL, RolloutSettings
from flowalign.training.rollouts.state_values import CompletionValues
from flowalign.types import Batch, CreditEstimator, ModelPlan, Request, StepCredit, encode_requests
from flowalign.types.trajectory import Completion, take_rows
from flowalign.utils.errors import require_default
from flowalign.utils.ranges import DenoisingSteps, GroupSize, PositiveInt, require_ranges
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


@dataclass(frozen=True, kw_only=True)
class Rollouts(TrainingPrompts, DataSource):
    """Pairs of samples of the policy, chosen by weighted rewards or by step-level credit.

    Samples are deterministic without credit.
    """

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
    credit: CreditEstimator | None = None
    """Credit method from `flowalign.credit`. Samples are then stochastic and paired at each trained
    step, within the groups of the method: siblings from the same state, or the samples of a prompt.
    A pair is trained at the noise levels of its steps. Null: pairs at every noise level."""
    sampling: StochasticSampling | None = None
    """Noise and branches of the samples, for `credit`. Null: chains with noise at all steps except
    the last."""
    completion: Completion = field(default_factory=Completion)
    """Completion of the intermediate states that the credit method values."""
    critic: Critic | None = None
    """Regression of outcomes on the denoiser's features, for credit methods that need a critic.
    Null: none."""
    step_weight: StepWeighting = "gap"
    """Weight of a pair at a step, for `credit`. gap: lead of the winner's advantage, divided by the
    mean lead of the batch. equal: 1."""
    advantages: AdvantageConfig = field(
        default_factory=lambda: AdvantageConfig(scale="none", clip=None)
    )
    """Comparison of the samples of a prompt. By default rewards are not normalised, so a rule's
    `min_gap` has the unit of the weighted reward."""
    on_failed_reward: OnFailure = "raise"
    """Action after a failed reward. raise: the run ends. drop_sample: samples without a reward are
    not paired. drop_group: the other samples of the prompt are not paired either."""

    def __post_init__(self) -> None:
        """Reject settings outside their ranges, and groups that cannot be compared."""
        require_ranges(self, self.key)
        self.advantages.check_groups(self.key, self.samples_per_prompt)
        self.advantages.refuse_extremes(self.key, f"{self.key}.rule chooses the samples")
        self._check_credit()

    @property
    def rollouts(self) -> RolloutSettings:
        """Return the rollout settings of a step."""
        plain = StochasticSampling() if self.credit else StochasticSampling(sde_window=NoSteps())
        noise = self.sampling or plain
        return RolloutSettings(
            sampling=noise.with_counts(self.num_steps, self.samples_per_prompt, self.micro_batch),
            credit=self.credit,
            completion=self.completion,
            critic=self.critic,
            advantages=self.advantages,
            prompts_per_step=self.prompts_per_step,
            key=self.key,
        )

    @property
    @override
    def paired(self) -> bool:
        return True

    @property
    @override
    def gives(self) -> Set[str]:
        return {"desirable", "scores"}

    @property
    @override
    def examples_per_step(self) -> int:
        """Return the largest number of pairs, which is reached if no samples are tied."""
        if self.credit is None:
            return self.prompts_per_step * self.rule.most(self.samples_per_prompt)
        rollouts = self.rollouts
        window = rollouts.window(0)
        group = rollouts.requirements(window).credit.group
        trained = rollouts.empty_trajectory(window).trained
        return self.prompts_per_step * count_pairs(self.rule, group, trained)

    @override
    def check(self, run: RunContext) -> None:
        """Raise ValueError if there is no weighted reward to compare samples by."""
        self.advantages.check(self.key, run, self.prompts)
        if self.sampling is not None:
            self.sampling.check_precision(self.key, run.policy)

    @override
    def check_context(self) -> None:
        if self.credit is not None:
            self.rollouts.refuse_features()

    @override
    def plan(self, run: RunContext, model: ModelPlan, world: int) -> RecipePlan:
        pairs = {"pairs per step": f"at most {self.examples_per_step}"}
        return plan_credited(self.rollouts, run, model, world, pairs)

    @override
    def open(self, learner: Learner, context: StreamContext) -> PairStream:
        """Return the stream, which samples each batch at its step.

        Raises:
            ValueError: There are fewer prompts per step than processes.
        """
        check_prompts_per_step(self.key, self.prompts_per_step, learner.processes.world)
        rewards = replace(context.rewards, on_failure=self.on_failed_reward)
        requests = Requests(read_requests(self.prompts), context.seed, context.conditioning)
        rule, weight = self.rule, self.step_weight
        return PairStream(self.rollouts, learner, rewards, requests, rule, weight)

    def _check_credit(self) -> None:
        """Raise ValueError if settings for credit are unused, or do not fit the credit method."""
        if self.credit is None:
            reason = (
                f"{self.key}.credit is null, not a class of flowalign.credit, so samples are "
                "deterministic"
            )
            require_default(self, self.key, reason, "sampling", "critic")
            return
        rollouts = self.rollouts
        for iteration in (0, SEVERAL):
            rollouts.requested(rollouts.credited_window(iteration))
