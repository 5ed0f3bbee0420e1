"""Define the interface of words that a policy is asked with beside the prompt of a request."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowalign.types.encoding import EncodesApart
from flowalign.types.policy import Personal, Policy
from flowalign.types.request import Request
from flowalign.types.trajectory import Cond
from flowalign.utils.ranges import FiniteFloat


@dataclass(frozen=True, kw_only=True)
class PromptGuidance:
    """Guides away from the empty prompt, to the prompt and to the dressed prompt apart.

    The velocity is w_o v(prompt) + (1 - w_o - w_d) v("") + w_d v(dressed prompt), which takes three
    network evaluations. Guidance of the policy's own does not act beside it.

    Source: original-prompt guidance of Parrot, arXiv:2401.05675, where both weights are 5.
    """

    original: FiniteFloat = 5.0
    """w_o: weight of the prompt alone."""
    dressed: FiniteFloat = 5.0
    """w_d: weight of the prompt with its words."""


class Dressing(ABC):
    """Asks a policy with more than the prompt: `dressing` of a run file.

    Rewards, files, groups and held-out splits keep the prompt, and the request keeps its key.
    """

    guidance: PromptGuidance | None
    """How sampling weighs the prompt with and without words. Null: only dressed prompts count."""

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
    def at_sampling(self, request: Request) -> Request:
        """Return the request as a user asks it: in evaluations, and of pairs in training."""

    @abstractmethod
    def at_rollout(self, request: Request, position: int) -> Request:
        """Return the request as training samples it, the `position`-th of the run."""

    @abstractmethod
    def at_training(self, request: Request, scores: Mapping[str, float]) -> Request:
        """Return the request under which a sample with these scores is learned.

        A score that is unknown is absent or NaN. A request that is dressed is that of a rollout.
        """


def with_words(form: str, prompt: str, words: Sequence[str], between: str = " ") -> str:
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
    told = [" ".join(word.split()).casefold() for word in words]
    for word in words:
        if told.count(" ".join(word.split()).casefold()) > 1:
            raise ValueError(f"{key} has the word {word!r} twice: give each meaning its own word")


def shown(dressing: Dressing | None) -> str:
    """Return how sampling asks for PROMPT, for plans, summaries and model cards; "" without words.

    It names the person, and how the prompt without words is weighed.
    """
    if dressing is None:
        return ""
    asked, guidance = dressing.at_sampling(Request("PROMPT")), dressing.guidance
    told = asked.asked + (f", for the person {asked.user}" if asked.user else "")
    if guidance is None:
        return told
    weights = f"weight {guidance.dressed:g}, PROMPT alone {guidance.original:g}"
    return f"{told}; {weights}, the empty prompt the rest of 1"


def conditioning(policy: Policy, requests: Sequence[Request]) -> Cond:
    """Return the conditioning on what requests ask: dressed prompts, and users of a `Personal`."""
    plain = [request.plain for request in requests]
    if isinstance(policy, EncodesApart) and policy.prompt_store:
        cond = policy.prompt_store.conditioning(policy, plain)
    else:
        cond = policy.encode(plain)
    if isinstance(policy, Personal) and any(request.user for request in requests):
        return policy.with_users(cond, [request.user for request in requests])
    return cond
