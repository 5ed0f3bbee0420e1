"""Tag prompts with reward tokens: one in training, all in inference (Parrot).

Source: Parrot, arXiv:2401.05675.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from typing_extensions import override

from flowalign.types import Policy, PromptConditioning, PromptGuidance, Request
from flowalign.types.prompt_conditioning import add_words, check_caption


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
