"""Make preference pairs from the policy's samples (online DPO): sample, score, pair, train.

With a credit method, samples are paired at each denoising step, see `step_pairs`.
"""

from collections.abc import Set
from dataclasses import dataclass, field, replace
from typing import ClassVar

from typing_extensions import override

from flowalign.credit.critic import Critic
from flowalign.data.preference.preference_data import BestWorst, Rule
from flowalign.data.requests import Requests, read_requests
from flowalign.rewards.checked import OnFailure
from flowalign.sampling.sampling_settings import StochasticSampling
from flowalign.sampling.sde_windows import NoSteps
from flowalign.training.learner import Learner
from flowalign.training.matching.pair_streams import PairStream, StepWeighting, count_pairs
from flowalign.training.matching.source import DataSource, StreamContext
from flowalign.training.recipe import (
    RecipePlan,
    RunContext,
    TrainingPrompts,
    check_prompts_per_step,
)
from flowalign.training.rollouts.advantage_config import AdvantageConfig
from flowalign.training.rollouts.rollout_plan import plan_credited
from flowalign.training.rollouts.rollout_settings import SEVERAL, RolloutSettings
from flowalign.types import CreditEstimator, ModelPlan
from flowalign.types.ranges import DenoisingSteps, GroupSize, PositiveInt, require_ranges
from flowalign.types.trajectory import Completion


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
        if self.samples_per_prompt < 2:
            raise ValueError(
                f"{self.key}.samples_per_prompt is {self.samples_per_prompt}; "
                "a pair takes at least 2"
            )
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
        if not run.rewards.weights.any():
            raise ValueError(
                "recipe.data of class Rollouts pairs samples by rewards: name reward models in "
                "rewards, and give at least one of their dimensions a weight"
            )
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
            for name in ("sampling", "critic"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{self.key}.{name} is set, but {self.key}.credit is null, so samples are "
                        f"deterministic: set {name} to null, or credit to a class of "
                        "flowalign.credit"
                    )
            return
        rollouts = self.rollouts
        for iteration in (0, SEVERAL):
            rollouts.requested(rollouts.credited_window(iteration))
