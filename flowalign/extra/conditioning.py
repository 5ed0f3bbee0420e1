"""Condition prompts on reward levels or reward words (Parrot), and requests on a user (PPD)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import isfinite
from typing import Literal

from typing_extensions import override

from flowalign.types import ConditionedPrompt, Policy, PromptConditioning, PromptGuidance, Request
from flowalign.types.prompt_conditioning import add_words, check_caption
from flowalign.utils.ranges import FiniteFloat, NonNegativeInt


@dataclass(frozen=True, kw_only=True)
class RewardLevels(PromptConditioning):
    """Prompt conditioning on the level that a sample reached in each reward dimension.

    Each training sample is captioned with its levels, and inference requests the best ones. Samples
    are not compared: use a loss that fits all of them, such as `SFT` with `on: all`. The policy
    learns the appearance of each level, and the requested level selects it.

    Source: Multi-Reward as Condition, arXiv:2411.04713. We implemented this from the abstract only:
    training is conditioned on scores from 0 to 5, and inference requests the highest. The paper
    feeds the scores to the network as embeddings. We put them in the caption, which works with any
    text encoder.
    """

    thresholds: Mapping[str, list[FiniteFloat]]
    """Increasing scores of each dimension at which the next level begins. Example: [0.5] makes two
    levels."""
    words: Mapping[str, list[str]] = field(default_factory=dict)
    """Words of the levels of a dimension, lowest level first. Default: the name and level, such as
    "exact_match 1/1"."""
    form: str = "{prompt}, {words}"
    """Template of the caption, with the fields prompt and words."""
    between: str = ", "
    """Separator between two words."""
    ask: Mapping[str, NonNegativeInt] = field(default_factory=dict)
    """Level of a dimension to request in inference, counted from 0. Default: the highest."""
    rollouts: Literal["conditioned", "plain"] = "conditioned"
    """Prompts of training rollouts. conditioned: the same as in inference. plain: without words."""
    guidance: PromptGuidance | None = None
    """Guidance that combines the plain and the conditioned prompt. Null: only the conditioned
    prompt is used."""

    def __post_init__(self) -> None:
        """Reject thresholds that do not increase, and repeated or missing words."""
        key = "conditioning.thresholds"
        if not self.thresholds:
            raise ValueError(f"{key} is empty; name a reward dimension and where its levels begin")
        for dim, steps in self.thresholds.items():
            if not steps or any(low >= high for low, high in pairwise(steps)):
                raise ValueError(f"{key}.{dim} is {steps}; levels need increasing numbers")
        self._check_levels()
        check_caption(self.form, [word for some in self.words.values() for word in some])

    def _check_levels(self) -> None:
        """Raise ValueError for words or requested levels without a dimension or threshold."""
        for name in ("words", "ask"):
            if unknown := sorted({*getattr(self, name)} - {*self.thresholds}):
                raise ValueError(
                    f"conditioning.{name} names {unknown[0]}; conditioning.thresholds has "
                    f"{', '.join(self.thresholds)}"
                )
        for dim, steps in self.thresholds.items():
            if len(words := self.words.get(dim, [None] * (len(steps) + 1))) != len(steps) + 1:
                raise ValueError(
                    f"conditioning.words.{dim} has {len(words)} words; its {len(steps)} thresholds "
                    f"make {len(steps) + 1} levels"
                )
            if self._level(dim) > len(steps):
                raise ValueError(
                    f"conditioning.ask.{dim} is {self._level(dim)}; the highest level is "
                    f"{len(steps)}"
                )

    @property
    @override
    def dims(self) -> list[str]:
        return [*self.thresholds]

    @override
    def check(self, policy: Policy, weights: Mapping[str, float]) -> None:
        for dim in self.thresholds:
            if dim not in weights:
                raise ValueError(
                    f"conditioning.thresholds names {dim}, which no reward gives; there are "
                    f"{', '.join(weights) or 'no scores'}"
                )

    @override
    def for_inference(self, request: Request) -> Request:
        return self._condition(request, {dim: self._level(dim) for dim in self.thresholds})

    @override
    def for_rollout(self, request: Request, position: int) -> Request:
        return request if self.rollouts == "plain" else self.for_inference(request)

    @override
    def for_training(self, request: Request, scores: Mapping[str, float]) -> Request:
        """Return the request with the levels of the scores; missing scores add no word."""
        known = {d: scores[d] for d in self.thresholds if isfinite(scores.get(d, float("nan")))}
        reached = {d: sum(score >= t for t in self.thresholds[d]) for d, score in known.items()}
        return self._condition(request, reached)

    def _level(self, dim: str) -> int:
        return self.ask.get(dim, len(self.thresholds[dim]))

    def _condition(self, request: Request, levels: Mapping[str, int]) -> Request:
        words = [self._word(dim, level) for dim, level in levels.items()]
        return add_words(request, self.form, [word for word in words if word], self.between)

    def _word(self, dim: str, level: int) -> str:
        if dim in self.words:
            return self.words[dim][level]
        return f"{dim} {level}/{len(self.thresholds[dim])}"


@dataclass(frozen=True, kw_only=True)
class RewardWords(PromptConditioning):
    """Prompt conditioning on one reward token per training prompt, cycling through the rewards.

    Only the reward of its token contributes to the advantages of a prompt. Set
    `recipe.advantages.pareto` to `group` to train only samples that no other sample of the prompt
    dominates. Inference uses all tokens, with separate guidance for the plain and the conditioned
    prompt.

    Source: Parrot, arXiv:2401.05675, without its prompt expansion network.
    """

    words: Mapping[str, str]
    """Token of each trained reward dimension."""
    form: str = "{words} {prompt}"
    """Template of the caption, with the fields words and prompt."""
    guidance: PromptGuidance | None = field(default_factory=PromptGuidance)
    """Guidance in inference, which combines the plain and the conditioned prompt. Null: only the
    conditioned prompt is used."""

    def __post_init__(self) -> None:
        """Reject reward dimensions without a token, and repeated tokens."""
        if not self.words or not all(word.strip() for word in self.words.values()):
            raise ValueError(
                f"conditioning.words is {dict(self.words)}; give each reward dimension a word"
            )
        check_caption(self.form, [*self.words.values()])

    @property
    @override
    def dims(self) -> list[str]:
        return [*self.words]

    @override
    def check(self, policy: Policy, weights: Mapping[str, float]) -> None:
        for dim in self.words:
            if not weights.get(dim):
                weighted = [name for name, weight in weights.items() if weight]
                raise ValueError(
                    f"conditioning.words names {dim}, which no reward with a weight gives; there "
                    f"are {', '.join(weighted) or 'no scores'}"
                )

    @override
    def for_inference(self, request: Request) -> Request:
        return self._condition(request, self.dims)

    @override
    def for_rollout(self, request: Request, position: int) -> Request:
        return self._condition(request, [self.dims[position % len(self.dims)]])

    @override
    def for_training(self, request: Request, scores: Mapping[str, float]) -> Request:
        """Return the request of a rollout unchanged, and that of a stored sample with all words."""
        return self.for_inference(request) if request.conditioned is None else request

    def _condition(self, request: Request, dims: list[str]) -> Request:
        return add_words(request, self.form, [self.words[dim] for dim in dims], dims=dims)


@dataclass(frozen=True, kw_only=True)
class Users(PromptConditioning):
    """Conditioning on the user that a request names, for policies with `user_conditioning`.

    It does not affect stored preferences. Training uses the user that is stored with them.

    Source: PPD, arXiv:2501.06655.
    """

    user: str = ""
    """Identifier of the user for requests that name none. Empty: no user."""
    column: str = "user_id"
    """Column of the requests with the user's identifier."""
    guidance: PromptGuidance | None = None
    """Must be null, because users do not change the prompt."""

    def __post_init__(self) -> None:
        """Reject guidance, because users do not change the prompt."""
        if self.guidance is not None:
            raise ValueError(
                "conditioning.guidance is set, but Users does not change prompts: set it to null"
            )

    @property
    @override
    def dims(self) -> tuple[()]:
        return ()

    @override
    def check(self, policy: Policy, weights: Mapping[str, float]) -> None:
        if policy.user_conditioning is None:
            raise ValueError(
                f"conditioning Users needs a personalised policy; {type(policy).__name__} has no "
                "user conditioning: use flowalign.extra.PersonalSD15 or PersonalSDXL, or leave it "
                "out"
            )
        if self.user:
            policy.user_conditioning.check_user(self.user)

    @override
    def for_inference(self, request: Request) -> Request:
        user = str(request.metadata.get(self.column, self.user))
        return replace(request, conditioned=ConditionedPrompt(request.policy_prompt, user))

    @override
    def for_rollout(self, request: Request, position: int) -> Request:
        return self.for_inference(request)

    @override
    def for_training(self, request: Request, scores: Mapping[str, float]) -> Request:
        return request
