"""Make examples from scored groups of the policy's samples, for forward-process RL.

requests -> samples -> rewards -> advantages -> clean samples with their advantages
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from typing_extensions import override

from flowalign.data.requests import Requests, read_requests
from flowalign.rewards.checked import OnFailure
from flowalign.rewards.composite import Rewards
from flowalign.rewards.latent_gradient import check_gradients
from flowalign.sampling.sampling_settings import Sampling
from flowalign.sampling.sde_windows import NoSteps
from flowalign.training.learner import Learner
from flowalign.training.matching.reward_moves import Moves, RewardAscent, RewardProposals
from flowalign.training.matching.scored_stream import ScoredStream
from flowalign.training.matching.source import DataSource, StreamContext
from flowalign.training.recipe import RecipePlan, RunContext, TrainingPrompts
from flowalign.training.rollouts.advantages import RewardMap, check_map
from flowalign.training.rollouts.rollout_plan import plan_credited
from flowalign.training.rollouts.rollout_settings import SEVERAL, RolloutFields, RolloutSettings
from flowalign.types import CreditEstimator, ModelPlan, Policy
from flowalign.utils.errors import refuse_conflicts, require_default
from flowalign.utils.ranges import PositiveInt, require_ranges


@dataclass(frozen=True, kw_only=True)
class ScoredGroups(TrainingPrompts, RolloutFields, DataSource):
    """Groups of samples per prompt, with the advantage of each sample within its group.

    The default sampler is deterministic. `sampling.tail_ratio: 1.0` makes its steps second order.
    """

    key: ClassVar[str] = "recipe.data"

    sampling: Sampling = field(default_factory=lambda: Sampling(sde_window=NoSteps()))
    """Sampling of the groups. Default: deterministic."""
    credit: CreditEstimator | None = None
    """Credit method from `flowalign.credit`, which needs a stochastic sampler. An example then has
    the advantage of the denoising step at its noise level, and noise levels of untrained steps are
    skipped. Null: the advantage of the outcome at every noise level."""
    clean: Literal["sample", "completion"] = "sample"
    """Clean latent to be noised. sample: the finished sample. completion: the completed state that
    the credit of the step was computed from."""
    weights: Literal["policy", "ema", "old", "behaviour"] = "policy"
    """Weights for sampling. policy: the current policy. ema: its evaluated average. old:
    `recipe.old`. behaviour: `recipe.behaviour`, which is only used for sampling."""
    weight_map: str | None = None
    """Name of a reward model with a spatial map that weights each sample's error (SRUM's local
    part). Null: equal weight at all positions."""
    spatial: RewardMap | None = None
    """Distribution of advantages over latent positions, for `NFT`. Null: equal advantages."""
    ascent: RewardAscent | None = None
    """Clean predictions at one step, moved along the reward gradient, for `OPSD`. Null: none."""
    proposals: RewardProposals | None = None
    """Moves of the samples along the reward gradient that are worth their length, for `MEND`. Null:
    none."""
    contrast: bool = False
    """Whether all visited states are matched, with the direction from the other of the two samples
    of a prompt, for `FDFO`."""
    modalities: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Reward dimensions of each part of the states, such as video and audio, for `OmniNFT`. A
    dimension may belong to several parts. Empty: a sample has one advantage."""

    scout_steps: PositiveInt | None = None
    """Denoising steps of previews of all samples. Only `advantages.extremes` of them are made with
    all steps, from the same noise (Sol-RL, arXiv:2604.06916). Null: all samples are."""
    on_failed_reward: OnFailure = "raise"
    """Action after a failed reward. raise: the run ends. drop_sample: samples with unknown credit
    are not trained. drop_group: the other samples of the prompt are not trained either."""

    def __post_init__(self) -> None:
        """Reject invalid settings before any model is loaded."""
        require_ranges(self, self.key)
        self.rollouts.check_groups()
        refuse_conflicts(self, self.key, _CONFLICTS)
        if self.moves:
            skipped = self.sampling.skipped(self.rollouts.window(0))
            self.moves.check_query({*range(self.sampling.num_steps)} - skipped, self.key)
        if self.contrast:
            _check_contrast(self)
        if self.scout_steps is not None:
            _check_scouts(self, self.scout_steps)
        for iteration in (0, SEVERAL):
            self._check_completions(self.rollouts.credited_window(iteration))

    @property
    def rollouts(self) -> RolloutSettings:
        """Return the rollout settings of a step."""
        kept = range(self.sampling.num_steps + 1) if self.contrast else ()
        kept = kept if self.query is None else (self.query,)
        return RolloutSettings(
            **self.rollout_fields(), also_kept=kept, key=self.key, scout_steps=self.scout_steps
        )

    @property
    def moves(self) -> Moves | None:
        """Return the moves along the reward gradient; None without any."""
        return self.ascent or self.proposals

    @property
    @override
    def gives(self) -> Set[str]:
        options = {
            "ascent": self.moves,
            "descent": self.ascent,
            "places": self.spatial,
            "contrast": self.contrast,
            "modality_advantage": self.modalities,
        }
        chosen = {name for name, option in options.items() if option}
        return {"desirable", "scores", "group", "advantage"} | chosen

    @property
    @override
    def trajectory_steps(self) -> int | None:
        """Return the number of denoising steps if their states are matched, else None."""
        return self.sampling.num_steps if self.moves or self.contrast else None

    @property
    @override
    def query(self) -> int | None:
        return self.moves.query if self.moves else None

    @property
    @override
    def sampled_weights(self) -> str:
        return self.weights

    @property
    @override
    def rows_per_group(self) -> int:
        """Return the number of trained samples per prompt; with step-level credit, all of them."""
        count = self.advantages.extremes
        return 2 * count if count and not self.credit else self.sampling.samples_per_prompt

    @property
    @override
    def examples_per_step(self) -> int:
        return self.prompts_per_step * self.rows_per_group

    @override
    def check(self, run: RunContext) -> None:
        """Raise ValueError if there is no weighted reward, or the sampling weights are missing."""
        self.advantages.check(self.key, run, self.prompts)
        self.sampling.check_precision(self.key, run.policy)
        if self.weight_map is not None:
            check_map(f"{self.key}.weight_map", self.weight_map, run.rewards)
        if self.spatial:
            self.spatial.check(f"{self.key}.spatial", run.rewards)
        if self.moves:
            check_gradients(run.rewards, self.moves.key)
        _check_modalities(self, run.rewards)
        run.check_weights(f"{self.key}.weights", self.weights)

    @override
    def check_context(self) -> None:
        self.rollouts.refuse_features()

    @override
    def plan(self, run: RunContext, model: ModelPlan, world: int) -> RecipePlan:
        self._check_parts(run.policy)
        count = self.examples_per_step
        plan = plan_credited(self.rollouts, run, model, world, {"examples per step": f"{count}"})
        return self.moves.extend_plan(plan, count, run.rewards) if self.moves else plan

    @override
    def open(self, learner: Learner, context: StreamContext) -> ScoredStream:
        """Return the stream, which samples each batch at its step."""
        rewards = replace(context.rewards, on_failure=self.on_failed_reward)
        requests = Requests(read_requests(self.prompts), context.seed, context.conditioning)
        completed = self.completed_states if self.clean == "completion" else None
        return ScoredStream(
            self.rollouts,
            learner,
            rewards,
            requests,
            self.weights,
            completed,
            self.weight_map,
            self.moves,
            self.spatial,
            self.contrast,
            self.modalities,
        )

    def completed_states(self, steps: Sequence[int]) -> dict[int, int]:
        """Map each trained step to the completed state that its credit is computed from.

        This is the first valued state after the step. A chain has only ODE steps between the two.
        """
        valued = sorted({k for k, how in self.rollouts.requested(steps) if how == self.completion})
        valued = [*valued, self.sampling.num_steps]
        return {k: next(j for j in valued if j > k) for k in steps}

    def _check_parts(self, policy: Policy) -> None:
        """Raise ValueError unless `modalities` names all parts of the policy's states."""
        parts, name = policy.modality_sizes, type(policy).__name__
        if self.modalities and {*self.modalities} != {*parts}:
            raise ValueError(
                f"{self.key}.modalities names {', '.join(self.modalities)}, but the states of "
                f"{name} have the parts {', '.join(parts) or 'none'}: name all of these"
                + ("" if parts else ", or leave modalities out")
            )

    def _check_completions(self, steps: Sequence[int]) -> None:
        """Raise ValueError if `clean` or the credit method needs completions that are missing."""
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
        reason = "clean is completion, which needs the weights and the guidance of the rollout"
        require_default(self, self.key, reason, "completion.weights", "completion.guidance")


_PLAIN = "credit", "weight_map", "spatial", "clean"
_ONE_STEP = "makes the examples from clean predictions at one step"
_CONFLICTS = {
    "weight_map": ("applies to finished samples", ("clean",)),
    "ascent": (_ONE_STEP, ("proposals", *_PLAIN)),
    "proposals": (_ONE_STEP, _PLAIN),
    "scout_steps": (
        "chooses samples by previews alone",
        (
            *("ascent", "proposals", "weight_map", "spatial"),
            *("sampling.seeds_per_prompt", "sampling.frame_window", "sampling.reward_guidance"),
        ),
    ),
    "contrast": (
        "matches the visited states of whole rollouts",
        ("ascent", "proposals", *_PLAIN, "sampling.tail_ratio"),
    ),
    "modalities": (
        "divides the advantage of the outcome at every noise level",
        ("credit", "ascent", "proposals", "contrast"),
    ),
}
"""Settings that others exclude, by the other, with what that does."""


def _check_scouts(cfg: ScoredGroups, steps: int) -> None:
    """Raise ValueError unless previews and samples are deterministic, and extremes are trained."""
    sampling, key = cfg.sampling, f"{cfg.key}.scout_steps"
    if not (count := cfg.advantages.extremes) or steps > sampling.num_steps:
        raise ValueError(
            f"{key} is {steps}; it must be at most num_steps {sampling.num_steps}, and needs "
            f"advantages.extremes, which is {count or 'null'}"
        )
    if sampling.stochastic(cfg.rollouts.window(0)):
        raise ValueError(
            f"{key} previews samples, but with noise between the steps the initial noise does not "
            f"fix the sample: set {cfg.key}.sampling.sde_window to flowalign.sampling.NoSteps"
        )


def _check_contrast(cfg: ScoredGroups) -> None:
    """Raise ValueError unless groups are two noisy trajectories from one initial noise."""
    sampling, every = cfg.sampling, (0, SEVERAL)
    two = sampling.samples_per_prompt == 2 and sampling.seeds_per_prompt == 1
    if not two or not all(cfg.rollouts.window(i) for i in every):
        raise ValueError(
            f"{cfg.key}.contrast compares two noisy samples from one initial noise: set "
            f"{cfg.key}.sampling.samples_per_prompt to 2, seeds_per_prompt to 1, and sde_window to "
            "flowalign.sampling.AllButLast"
        )


def _check_modalities(cfg: ScoredGroups, rewards: Rewards) -> None:
    """Raise ValueError unless exactly the weighted dimensions are given to parts of the states."""
    if not cfg.modalities:
        return
    weighted = sorted(rewards.weighted_dims)
    routed = sorted({dim for dims in cfg.modalities.values() for dim in dims})
    if routed != weighted:
        raise ValueError(
            f"{cfg.key}.modalities names the rewards {', '.join(sorted(routed)) or 'none'}; those "
            f"with a weight are {', '.join(sorted(weighted))}: name each of these at least once"
        )
