"""Give each reward a word, train samples asked with it on that reward, and sample with all: Parrot.

Source: Parrot, arXiv:2401.05675.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

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


@dataclass(frozen=True, kw_only=True)
class RewardWords(Dressing):
    """Asks for one request after another with the word of one reward, which alone counts for it.

    Set `recipe.pareto` to `group`: only samples that no other of their prompt dominates are
    trained. Sampling asks with all words, guided to the prompt and to the dressed prompt apart.

    Source: Parrot, arXiv:2401.05675, without the network that expands prompts.
    """

    words: Mapping[str, str]
    """Word of each reward dimension that is trained."""
    form: str = "{words} {prompt}"
    """Where the words stand."""
    guidance: PromptGuidance | None = field(default_factory=PromptGuidance)
    """Guidance of sampling. Null: the dressed prompt in place of the prompt."""

    def __post_init__(self) -> None:
        """Reject rewards without a word, and words that do not tell rewards apart."""
        if not self.words or not all(word.strip() for word in self.words.values()):
            raise ValueError(
                f"dressing.words is {dict(self.words)}; give each reward dimension a word"
            )
        check_words("dressing.words", [*self.words.values()])
        check_form("dressing.form", self.form)

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
                    f"dressing.words names {dim}, which no reward with a weight gives; there are "
                    f"{', '.join(weighted) or 'no scores'}"
                )

    @override
    def at_sampling(self, request: Request) -> Request:
        return self._dressed(request, self.dims)

    @override
    def at_rollout(self, request: Request, position: int) -> Request:
        return self._dressed(request, [self.dims[position % len(self.dims)]])

    @override
    def at_training(self, request: Request, scores: Mapping[str, float]) -> Request:
        """Return a rollout as it was asked for, and stored samples with all words."""
        return self.at_sampling(request) if request.dress is None else request

    def _dressed(self, request: Request, dims: list[str]) -> Request:
        prompt = with_words(self.form, request.prompt, [self.words[dim] for dim in dims])
        return replace(request, dress=Dress(prompt, request.user, tuple(dims)))
