"""Make examples of scored groups of the policy's own samples: learning on the forward process.

requests -> samples -> rewards -> advantages -> the clean samples with their advantages
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from typing_extensions import override

from flowalign.credit.critic import Critic
from flowalign.data.requests import Requests, read_requests
from flowalign.rewards.checked import OnFailure
from flowalign.rewards.composite import Rewards
from flowalign.sampling.sde_windows import NoSteps
from flowalign.sampling.settings import Sampling
from flowalign.training.learner import Learner
from flowalign.training.matching.scored_stream import ScoredStream
from flowalign.training.matching.source import DataSource, StreamContext
from flowalign.training.recipe import RecipePlan, RunContext, evaluations_row
from flowalign.training.rollouts.advantage_config import AdvantageConfig
from flowalign.training.rollouts.rollout_plan import (
    check_rollouts,
    rollout_evaluations,
    rollout_memory,
    sample_rows,
    value_rows,
)
from flowalign.training.rollouts.settings import SEVERAL, RolloutSettings
from flowalign.types import CreditEstimator, Label, ModelPlan
from flowalign.types.completion import Completion
from flowalign.types.ranges import PositiveInt, require_ranges


@dataclass(frozen=True, kw_only=True)
class ScoredGroups(DataSource):
    """Samples groups of each prompt, and gives each sample its advantage among its group.

    The default sampler is the deterministic one; `sampling.tail_ratio` 1.0 makes its steps of
    second order.
    """

    key: ClassVar[str] = "recipe.data"

    prompts: str
    """Path of the training prompts: a text file, one a line, or JSONL with a field `prompt`, and
    `image`, `images` or `mask` where the policy takes them."""
    prompts_per_step: PositiveInt = 8
    """P, prompts of a step over all processes together."""
    rollout_batch_prompts: PositiveInt | None = None
    """Prompts of a process that are sampled together; rewards of one batch are computed while the
    next is sampled. Null: all of them. Changes time and memory, not the update."""
    sampling: Sampling = field(default_factory=lambda: Sampling(sde_window=NoSteps()))
    """How the samples of a prompt are drawn: by default without noise between the steps."""
    credit: CreditEstimator | None = None
    """Null: a sample counts at every noise level by its outcome. A class of `flowalign.credit`: it
    counts at a noise level by what the denoising step there earned, and at those of steps that are
    not trained not at all; needs a stochastic sampler."""
    completion: Completion = field(default_factory=Completion)
    """Completion of intermediate states whose values the credit method requests."""
    critic: Critic | None = None
    """Regression that predicts outcomes from the denoiser's features, for credit that reads its
    predictions. Null: none."""
    advantages: AdvantageConfig = field(default_factory=AdvantageConfig)
    """Comparison of credit: normalisation, weighting of rewards, clipping and selection."""
    clean: Literal["sample", "completion"] = "sample"
    """Clean latent that is noised. sample: the finished sample. completion: where a step's credit
    rests on the value of a later state, the completion of that state, which is what was valued."""
    weights: Literal["policy", "ema", "old", "behaviour"] = "policy"
    """Weights that sample: of the policy, of its evaluated average, of its old self (`recipe.old`),
    or of an average that is only sampled from (`recipe.behaviour`)."""
    weight_map: str | None = None
    """Name of the reward model whose map weighs the places of each sample's error (SRUM's local
    part). Null: all places weigh alike."""

    on_failed_reward: OnFailure = "raise"
    """raise: a failed reward ends the run. drop_sample: samples whose credit is unknown are not
    trained. drop_group: nor are the other samples of their prompt."""

    def __post_init__(self) -> None:
        """Reject settings that no run can use, before anything heavy is loaded."""
        require_ranges(self, self.key)
        self.rollouts.check_groups()
        for iteration in (0, SEVERAL):
            steps = self.rollouts.window(iteration)
            if self.credit is not None and not steps:
                raise ValueError(
                    f"{self.key}.credit is {type(self.credit).__name__}, which credits stochastic "
                    f"denoising steps, and {self.key}.sampling.sde_window has none: choose one "
                    "such as flowalign.sampling.AllButLast, or set credit to null"
                )
            self._check_completions(steps)

    @property
    def rollouts(self) -> RolloutSettings:
        """Return the rollouts of a step."""
        return RolloutSettings(
            sampling=self.sampling,
            credit=self.credit,
            completion=self.completion,
            critic=self.critic,
            advantages=self.advantages,
            prompts_per_step=self.prompts_per_step,
            rollout_batch_prompts=self.rollout_batch_prompts,
            key=self.key,
        )

    @property
    @override
    def provides(self) -> Set[Label]:
        return {"labels", "advantages"}

    @property
    @override
    def sampled_weights(self) -> str:
        return self.weights

    @property
    @override
    def rows_per_group(self) -> int:
        """Return the samples of a prompt that are trained, of steps at most all."""
        size, count = self.sampling.samples_per_prompt, self.advantages.extremes
        return size if count is None or self.credit else 2 * count

    @property
    @override
    def examples_per_step(self) -> int:
        return self.prompts_per_step * self.rows_per_group

    @property
    @override
    def prompt_files(self) -> list[str]:
        return [self.prompts]

    @property
    @override
    def leaves_levels_out(self) -> bool:
        return self.credit is not None

    @override
    def check(self, run: RunContext) -> None:
        """Raise ValueError if no reward compares samples, or weights that sample are missing."""
        self.advantages.check(self.key, run, self.prompts)
        self.sampling.check_precision(self.key, run.policy)
        _check_map(self, run.rewards)
        if self.weights == "ema" and not run.has_ema:
            raise ValueError(f"{self.key}.weights is ema, but ema is null; set ema, or policy")

    @override
    def check_context(self) -> None:
        self.rollouts.refuse_features()

    @override
    def plan(self, run: RunContext, model: ModelPlan, world: int) -> RecipePlan:
        rollouts = self.rollouts
        check_rollouts(rollouts, run, model, world)
        window = rollouts.window(0)
        counts = rollout_evaluations(rollouts, window, run.policy.evaluations_per_velocity)
        cost = {name: n * self.prompts_per_step for name, n in counts.items()}
        rows = {
            **sample_rows(rollouts, window),
            **evaluations_row(cost, "evaluations of samples per step"),
            **value_rows(rollouts, run, window),
            "examples per step": f"{self.examples_per_step}",
        }
        if self.credit is not None:
            sigmas = model.sigmas(self.sampling.num_steps)
            spans = [f"{float(sigmas[k + 1]):.3g} to {float(sigmas[k]):.3g}" for k in window]
            rows["noise levels with credit"] = ", ".join(spans)
            own = int(rollouts.empty_trajectory(window).trained.sum(1).max())
            if own < len(window):
                rows["noise levels with credit"] += f"; a sample has those of {own} of these steps"
        return RecipePlan(
            rows=rows,
            parts=rollout_memory(rollouts, model, world, window),
            decode_batches={f"{self.key}.sampling.micro_batch": self.sampling.micro_batch},
        )

    @override
    def open(self, learner: Learner, context: StreamContext) -> ScoredStream:
        """Prepare the stream; batches are made at their steps."""
        rewards = replace(context.rewards, on_failure=self.on_failed_reward)
        requests = Requests(read_requests(self.prompts), context.seed, context.conditioning)
        completed = self.completed_states if self.clean == "completion" else None
        return ScoredStream(
            self.rollouts, learner, rewards, requests, self.weights, completed, self.weight_map
        )

    def completed_states(self, steps: Sequence[int]) -> dict[int, int]:
        """Return, for each trained step, the state whose completion its credit rests on.

        That is the first valued state after the step; between the two a chain takes ODE steps only.
        """
        valued = sorted({k for k, how in self.rollouts.requested(steps) if how == self.completion})
        valued = [*valued, self.sampling.num_steps]
        return {k: next(j for j in valued if j > k) for k in steps}

    def _check_completions(self, steps: Sequence[int]) -> None:
        """Raise ValueError if completions are asked for that do not exist, or are not kept."""
        if self.clean == "sample":
            self.rollouts.requested(steps)
            return
        end = self.sampling.num_steps
        if self.credit is None or not any(k < end for k in self.completed_states(steps).values()):
            raise ValueError(
                f"{self.key}.clean is completion, but credit "
                f"{type(self.credit).__name__ if self.credit else 'null'} values finished samples "
                "only: set clean to sample, or credit to flowalign.credit.Gain"
            )
        if not self.completion.follows_rollout:
            raise ValueError(
                f"{self.key}.clean is completion, which needs completions by the weights and the "
                f"guidance of the rollout: leave {self.key}.completion at them"
            )


def _check_map(cfg: ScoredGroups, rewards: Rewards) -> None:
    """Raise ValueError if no reward gives the map, or if other latents than its are noised."""
    mapping = [model.spec.name for model in rewards.models if model.spec.maps]
    if cfg.weight_map is not None and cfg.weight_map not in mapping:
        raise ValueError(
            f"{cfg.key}.weight_map is {cfg.weight_map!r}; rewards with a map here: "
            f"{', '.join(mapping) or 'none, take one such as reward_models.RegionReward'}"
        )
    if cfg.weight_map is not None and cfg.clean == "completion":
        raise ValueError(
            f"{cfg.key}.weight_map is of finished samples, and clean is completion: set clean "
            "to sample"
        )
