"""Say in the prompt how good a sample is in each reward, and ask for the best: conditioning on it.

Source: Multi-Reward as Condition, arXiv:2411.04713, of which the abstract was read: scores from 0
to 5 condition training, and sampling asks for the highest. There they are embedded and enter the
network; here they are words in the caption, which any text encoder reads: our form.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import isfinite
from typing import Literal

from typing_extensions import override

from flowalign.types import (
    Dress,
    Dressing,
    Policy,
    PromptGuidance,
    Request,
    check_form,
    check_words,
    with_words,
)
from flowalign.utils.ranges import FiniteFloat, NonNegativeInt


@dataclass(frozen=True, kw_only=True)
class RewardLevels(Dressing):
    """Trains each sample under a word for its level in each dimension, and samples under the best.

    Nothing compares samples: a loss that fits all of them, `SFT` with `on: all`, learns what each
    level looks like, and the level that is asked for chooses.

    Source: Multi-Reward as Condition, arXiv:2411.04713, in a form of ours.
    """

    thresholds: Mapping[str, list[FiniteFloat]]
    """Scores of each dimension at which the next level begins, increasing: [0.5] makes two."""
    words: Mapping[str, list[str]] = field(default_factory=dict)
    """Word of each level of a dimension, the lowest first. Unnamed dimensions say "strict 1/1"."""
    form: str = "{prompt}, {words}"
    """Where the words stand."""
    between: str = ", "
    """What stands between two words."""
    ask: Mapping[str, NonNegativeInt] = field(default_factory=dict)
    """Level of a dimension that sampling asks for, from 0. Unnamed dimensions: the highest."""
    rollouts: Literal["dressed", "plain"] = "dressed"
    """How samples to train on are asked for: as at sampling, or by their prompts alone."""
    guidance: PromptGuidance | None = None
    """Guidance to the prompt with and without words. Null: the dressed prompt in its place."""

    def __post_init__(self) -> None:
        """Reject levels without order, and words that do not tell them apart."""
        key = "dressing.thresholds"
        if not self.thresholds:
            raise ValueError(f"{key} is empty; name a reward dimension and where its levels begin")
        for dim, steps in self.thresholds.items():
            if not steps or any(low >= high for low, high in pairwise(steps)):
                raise ValueError(f"{key}.{dim} is {steps}; levels need increasing numbers")
        self._check_levels()
        check_words("dressing.words", [word for some in self.words.values() for word in some])
        check_form("dressing.form", self.form)

    def _check_levels(self) -> None:
        """Raise ValueError for words, or levels to ask for, of no dimension or no level."""
        for name in ("words", "ask"):
            if unknown := sorted({*getattr(self, name)} - {*self.thresholds}):
                raise ValueError(
                    f"dressing.{name} names {unknown[0]}; dressing.thresholds has "
                    f"{', '.join(self.thresholds)}"
                )
        for dim, steps in self.thresholds.items():
            if len(told := self.words.get(dim, [None] * (len(steps) + 1))) != len(steps) + 1:
                raise ValueError(
                    f"dressing.words.{dim} has {len(told)} words; its {len(steps)} thresholds make "
                    f"{len(steps) + 1} levels"
                )
            if self._level(dim) > len(steps):
                raise ValueError(
                    f"dressing.ask.{dim} is {self._level(dim)}; the highest level is {len(steps)}"
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
                    f"dressing.thresholds names {dim}, which no reward gives; there are "
                    f"{', '.join(weights) or 'no scores'}"
                )

    @override
    def at_sampling(self, request: Request) -> Request:
        return self._dressed(request, {dim: self._level(dim) for dim in self.thresholds})

    @override
    def at_rollout(self, request: Request, position: int) -> Request:
        return request if self.rollouts == "plain" else self.at_sampling(request)

    @override
    def at_training(self, request: Request, scores: Mapping[str, float]) -> Request:
        """Return the request with the levels of these scores; unknown scores say nothing."""
        known = {d: scores[d] for d in self.thresholds if isfinite(scores.get(d, float("nan")))}
        reached = {d: sum(score >= t for t in self.thresholds[d]) for d, score in known.items()}
        return self._dressed(request, reached)

    def _level(self, dim: str) -> int:
        return self.ask.get(dim, len(self.thresholds[dim]))

    def _dressed(self, request: Request, levels: Mapping[str, int]) -> Request:
        said = [self._word(dim, level) for dim, level in levels.items()]
        prompt = with_words(self.form, request.prompt, [w for w in said if w], self.between)
        return replace(request, dress=Dress(prompt, request.user))

    def _word(self, dim: str, level: int) -> str:
        if dim in self.words:
            return self.words[dim][level]
        return f"{dim} {level}/{len(self.thresholds[dim])}"
