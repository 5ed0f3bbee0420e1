"""Define `Request`: what a user asks a model for, which is more than a prompt."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Reference:
    """Refers to a picture or a clip that a request comes with, by its content."""

    name: str = field(compare=False)
    """Name of the file, as errors show it."""
    digest: str
    """SHA-256 of the file's content in hexadecimal: what makes two references equal."""
    read: Callable[[], Float[Tensor, "F 3 H W"]] = field(compare=False, repr=False)
    """Return the pixels as RGB in [0, 1]; a picture has one frame."""


@dataclass(frozen=True)
class ConditionedPrompt:
    """Says how a policy is asked for a request, where that is not by its prompt alone."""

    prompt: str
    """Prompt that the policy is given: that of the request, with words beside it."""
    user: str = ""
    """Identifier of the person that a personalised policy is asked for; empty: nobody."""
    dims: tuple[str, ...] = ()
    """Reward dimensions that count for samples of the request so asked; empty: all."""


@dataclass(frozen=True, eq=False)
class Request:
    """Holds a prompt, and what an editing or image-to-video model is given with it."""

    prompt: str
    """Text, or the instruction of an edit."""
    references: tuple[Reference, ...] = ()
    """Source pictures, a first frame, or clips, in the order that the prompt counts them."""
    mask: Reference | None = None
    """Picture that is white where the first reference is to be painted anew."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Further columns of the row, for rewards that read them."""
    conditioned: ConditionedPrompt | None = None
    """Prompt of the policy, see `PromptConditioning`; None: the prompt. Rewards see the prompt."""

    @property
    def policy_prompt(self) -> str:
        """Return the prompt that the policy is given."""
        return self.prompt if self.conditioned is None else self.conditioned.prompt

    @property
    def policy_request(self) -> "Request":
        """Return what the policy is given as a request of its own, whose prompt has the words."""
        return (
            self
            if self.conditioned is None
            else replace(self, prompt=self.policy_prompt, conditioned=None)
        )

    @property
    def user(self) -> str:
        """Return the identifier of the person that a personalised policy is asked for, or ""."""
        return "" if self.conditioned is None else self.conditioned.user

    @cached_property
    def key(self) -> str:
        """Return 16 hexadecimal digits that equal requests share, whatever their files are called.

        Groups, seeds, held-out splits and pairs go by it, however the policy is asked.
        """
        mask = self.mask.digest if self.mask else ""
        content = self.prompt, [one.digest for one in self.references], mask, dict(self.metadata)
        serialised = json.dumps(content, sort_keys=True, default=str)
        return hashlib.sha256(serialised.encode()).hexdigest()[:16]

    @cached_property
    def input_digest(self) -> bytes:
        """Return a digest of what a policy is given: everything but the metadata.

        That of a prompt alone is the prompt's, by which caches of conditioning go from the first.
        """
        if not self.references and self.mask is None and not self.user:
            return hashlib.sha256(self.policy_prompt.encode()).digest()
        mask = self.mask.digest if self.mask else ""
        content = self.policy_prompt, [one.digest for one in self.references], mask
        content = (*content, self.user) if self.user else content
        return hashlib.sha256(json.dumps(content).encode()).digest()

    def __eq__(self, other: object) -> bool:
        """Return whether both ask the same."""
        return isinstance(other, Request) and self.key == other.key

    def __hash__(self) -> int:
        """Return a hash of the key."""
        return hash(self.key)


def plain_requests(prompts: Iterable[str]) -> list[Request]:
    """Return requests that are a prompt and nothing else."""
    return [Request(prompt) for prompt in prompts]


def prompts_of(requests: Iterable[Request]) -> list[str]:
    """Return the prompts of requests, which may be equal."""
    return [request.prompt for request in requests]
