"""Define the interface of words that are added to the prompt that a policy sees."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from flowalign.types.policy import Policy
from flowalign.types.request import ConditionedPrompt, Request
from flowalign.types.trajectory import Cond
from flowalign.utils.ranges import FiniteFloat


@dataclass(frozen=True, kw_only=True)
class PromptGuidance:
    """Guidance with separate weights for the plain prompt and the conditioned prompt.

    The velocity is w_o v(prompt) + (1 - w_o - w_d) v("") + w_d v(conditioned prompt), which takes
    three network evaluations. It replaces the policy's own guidance.

    Source: original-prompt guidance of Parrot, arXiv:2401.05675, where both weights are 5.
    """

    original: FiniteFloat = 5.0
    """Weight w_o of the prompt without added words."""
    conditioned: FiniteFloat = 5.0
    """Weight w_d of the prompt with added words."""


class PromptConditioning(ABC):
    """Words or users added to the policy's prompt; set as `conditioning` in a run file.

    Rewards, files, groups and held-out splits use the plain prompt. The request keeps its key.
    """

    guidance: PromptGuidance | None
    """Weights of the prompt with and without words in sampling. Null: conditioned prompt only."""

    @property
    @abstractmethod
    def dims(self) -> Sequence[str]:
        """Return the reward dimensions that the words describe; empty if they describe none."""

    @abstractmethod
    def check(self, policy: Policy, weights: Mapping[str, float]) -> None:
        """Raise ValueError if the policy, or a reward dimension or weight, does not fit.

        `weights` maps reward dimensions to their weights. Network weights are not needed.
        """

    @abstractmethod
    def for_inference(self, request: Request) -> Request:
        """Return the request for evaluation and inference, and for training on pairs."""

    @abstractmethod
    def for_rollout(self, request: Request, position: int) -> Request:
        """Return the request for the rollout number `position` of the run."""

    @abstractmethod
    def for_training(self, request: Request, scores: Mapping[str, float]) -> Request:
        """Return the request under which a sample with `scores` is trained.

        Unknown scores are absent or NaN. If `request` is conditioned, it comes from a rollout.
        """


def insert_words(form: str, prompt: str, words: Sequence[str], between: str = " ") -> str:
    """Return `prompt` with `words` inserted into a form such as "{prompt}, {words}".

    Without words the prompt is unchanged. The empty prompt of guidance stays empty.
    """
    if not words or not prompt:
        return prompt
    return form.replace("{words}", between.join(words)).replace("{prompt}", prompt)


def add_words(
    request: Request, form: str, words: Sequence[str], between: str = " ", dims: Sequence[str] = ()
) -> Request:
    """Return `request` with `words`, which describe the rewards `dims`, in its policy prompt."""
    prompt = insert_words(form, request.prompt, words, between)
    return replace(request, conditioned=ConditionedPrompt(prompt, request.user, tuple(dims)))


def check_caption(form: str, words: Sequence[str]) -> None:
    """Raise ValueError unless `form` has {prompt} and {words} once each, and all `words` differ.

    Case and spacing do not count as differences. One word may be empty.
    """
    normalised = [" ".join(word.split()).casefold() for word in words]
    for word, plain in zip(words, normalised, strict=True):
        if normalised.count(plain) > 1:
            raise ValueError(
                f"conditioning.words has the word {word!r} twice: give each meaning its own word"
            )
    if not all(form.count(place) == 1 for place in ("{prompt}", "{words}")):
        raise ValueError(
            f"conditioning.form is {form!r}; it needs {{prompt}} and {{words}}, once each"
        )


def describe_conditioning(conditioning: PromptConditioning | None) -> str:
    """Return the conditioned form of the prompt "PROMPT", for plans, summaries and model cards.

    The text includes the user and the guidance weights. It is "" without conditioning.
    """
    if conditioning is None:
        return ""
    request, guidance = conditioning.for_inference(Request("PROMPT")), conditioning.guidance
    person = f", for the user {request.user}" if request.user else ""
    description = request.policy_prompt + person
    if guidance is None:
        return description
    weights = f"weight {guidance.conditioned:g}, PROMPT alone {guidance.original:g}"
    return f"{description}; {weights}, the empty prompt the remaining weight"


def encode_requests(policy: Policy, requests: Sequence[Request]) -> Cond:
    """Return the conditioning of requests, from their conditioned prompts and their users."""
    plain = [request.policy_request for request in requests]
    cache = policy.text_encoder.cache if policy.text_encoder else None
    cond = cache.conditioning(policy, plain) if cache else _encode_rows(policy, plain)
    users = policy.user_conditioning
    if users and any(request.user for request in requests):
        return users.add_users(cond, [request.user for request in requests])
    return cond


def _encode_rows(policy: Policy, requests: Sequence[Request]) -> Cond:
    """Encode requests, as many together as the run sets."""
    size = policy.text_encoder and policy.text_encoder.micro_batch
    if size is None or size >= len(requests):
        return policy.encode(requests)
    parts = [policy.encode(requests[i : i + size]) for i in range(0, len(requests), size)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
