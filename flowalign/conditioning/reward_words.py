"""Give each reward a word, train samples asked with it on that reward, and sample with all: Parrot.

Source: Parrot, arXiv:2401.05675.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from typing_extensions import override

from flowalign.types import (
    ConditionedPrompt,
    Policy,
    PromptConditioning,
    PromptGuidance,
    Request,
    check_form,
    check_words,
    insert_words,
)


@dataclass(frozen=True, kw_only=True)
class RewardWords(PromptConditioning):
    """Asks for one request after another with the word of one reward, which alone counts for it.

    Set `recipe.advantages.pareto` to `group`: only samples that no other of their prompt
    dominates are trained. Sampling asks with all words, guided to the prompt and to the
    conditioned prompt apart.

    Source: Parrot, arXiv:2401.05675, without the network that expands prompts.
    """

    words: Mapping[str, str]
    """Word of each reward dimension that is trained."""
    form: str = "{words} {prompt}"
    """Where the words stand."""
    guidance: PromptGuidance | None = field(default_factory=PromptGuidance)
    """Guidance of sampling. Null: the conditioned prompt in place of the prompt."""

    def __post_init__(self) -> None:
        """Reject rewards without a word, and words that do not tell rewards apart."""
        if not self.words or not all(word.strip() for word in self.words.values()):
            raise ValueError(
                f"conditioning.words is {dict(self.words)}; give each reward dimension a word"
            )
        check_words("conditioning.words", [*self.words.values()])
        check_form("conditioning.form", self.form)

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
        """Return a rollout as it was asked for, and stored samples with all words."""
        return self.for_inference(request) if request.conditioned is None else request

    def _condition(self, request: Request, dims: list[str]) -> Request:
        prompt = insert_words(self.form, request.prompt, [self.words[dim] for dim in dims])
        return replace(request, conditioned=ConditionedPrompt(prompt, request.user, tuple(dims)))
