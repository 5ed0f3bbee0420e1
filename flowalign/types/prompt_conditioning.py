"""Define the interface of words that a policy is asked with beside the prompt of a request."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowalign.types.policy import Policy
from flowalign.types.ranges import FiniteFloat
from flowalign.types.request import Request
from flowalign.types.trajectory import Cond


@dataclass(frozen=True, kw_only=True)
class PromptGuidance:
    """Guides away from the empty prompt, to the prompt and to the conditioned prompt apart.

    The velocity is w_o v(prompt) + (1 - w_o - w_d) v("") + w_d v(conditioned prompt), which takes
    three network evaluations. Guidance of the policy's own does not act beside it.

    Source: original-prompt guidance of Parrot, arXiv:2401.05675, where both weights are 5.
    """

    original: FiniteFloat = 5.0
    """w_o: weight of the prompt alone."""
    conditioned: FiniteFloat = 5.0
    """w_d: weight of the prompt with its words."""


class PromptConditioning(ABC):
    """Asks a policy with more than the prompt: `conditioning` of a run file.

    Rewards, files, groups and held-out splits keep the prompt, and the request keeps its key.
    """

    guidance: PromptGuidance | None
    """How sampling weighs the prompt with and without words. Null: conditioned prompts only."""

    @property
    @abstractmethod
    def dims(self) -> Sequence[str]:
        """Return the reward dimensions that the words are about; empty if about none."""

    @abstractmethod
    def check(self, policy: Policy, weights: Mapping[str, float]) -> None:
        """Raise ValueError for a policy, or reward dimensions with these weights, that do not fit.

        Needs no weights of networks.
        """

    @abstractmethod
    def for_inference(self, request: Request) -> Request:
        """Return the request as a user asks it: in evaluations, and of pairs in training."""

    @abstractmethod
    def for_rollout(self, request: Request, position: int) -> Request:
        """Return the request as training samples it, the `position`-th of the run."""

    @abstractmethod
    def for_training(self, request: Request, scores: Mapping[str, float]) -> Request:
        """Return the request under which a sample with these scores is learned.

        A score that is unknown is absent or NaN. A conditioned request is that of a rollout.
        """


def insert_words(form: str, prompt: str, words: Sequence[str], between: str = " ") -> str:
    """Return a prompt with words in a form such as "{prompt}, {words}"; without words the prompt.

    The empty prompt, which guidance is taken from, stays empty.
    """
    if not words or not prompt:
        return prompt
    return form.replace("{words}", between.join(words)).replace("{prompt}", prompt)


def check_form(key: str, form: str) -> None:
    """Raise ValueError unless a form has a place for the prompt and one for words."""
    if not all(form.count(place) == 1 for place in ("{prompt}", "{words}")):
        raise ValueError(f"{key} is {form!r}; it needs {{prompt}} and {{words}}, once each")


def check_words(key: str, words: Sequence[str]) -> None:
    """Raise ValueError for a word twice, which would say two things; no word may be so once."""
    normalised = [" ".join(word.split()).casefold() for word in words]
    for word in words:
        if normalised.count(" ".join(word.split()).casefold()) > 1:
            raise ValueError(f"{key} has the word {word!r} twice: give each meaning its own word")


def describe_conditioning(conditioning: PromptConditioning | None) -> str:
    """Return how sampling asks for PROMPT, for plans, summaries and model cards; "" without words.

    It names the person, and how the prompt without words is weighed.
    """
    if conditioning is None:
        return ""
    request, guidance = conditioning.for_inference(Request("PROMPT")), conditioning.guidance
    person = f", for the person {request.user}" if request.user else ""
    description = request.policy_prompt + person
    if guidance is None:
        return description
    weights = f"weight {guidance.conditioned:g}, PROMPT alone {guidance.original:g}"
    return f"{description}; {weights}, the empty prompt the rest of 1"


def encode_requests(policy: Policy, requests: Sequence[Request]) -> Cond:
    """Return the conditioning of requests: of their conditioned prompts, and users if there are."""
    plain = [request.policy_request for request in requests]
    cache = policy.text_encoder.cache if policy.text_encoder else None
    cond = cache.conditioning(policy, plain) if cache else policy.encode(plain)
    users = policy.user_conditioning
    if users and any(request.user for request in requests):
        return users.add_users(cond, [request.user for request in requests])
    return cond
