"""Define `Request`: a prompt with its references, mask and metadata."""

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
    """Image or clip that belongs to a request, identified by its content."""

    name: str = field(compare=False)
    """Name of the file, for error messages."""
    digest: str
    """SHA-256 of the file's content in hexadecimal; references with equal digests are equal."""
    read: Callable[[], Float[Tensor, "F 3 H W"]] = field(compare=False, repr=False)
    """Function that returns the pixels as RGB in [0, 1]; an image has one frame."""


@dataclass(frozen=True)
class ConditionedPrompt:
    """Policy input that replaces the plain prompt of a request."""

    prompt: str
    """Prompt for the policy: the prompt of the request with added words."""
    user: str = ""
    """Id of the user, for a personalised policy; empty: no user."""
    dims: tuple[str, ...] = ()
    """Reward dimensions that contribute to the advantages of the samples; empty: all."""


@dataclass(frozen=True, eq=False)
class Request:
    """Prompt, with the references and the mask of an editing or image-to-video model."""

    prompt: str
    """Text, or the instruction of an edit."""
    references: tuple[Reference, ...] = ()
    """Source images, a first frame, or clips, in the order in which the prompt numbers them."""
    mask: Reference | None = None
    """Image that is white where the first reference is repainted; None: no mask."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Further columns of the row, for rewards that read them."""
    conditioned: ConditionedPrompt | None = None
    """Input of the policy, see `PromptConditioning`. None: `prompt`. Rewards always use
    `prompt`."""

    @property
    def policy_prompt(self) -> str:
        """Return the prompt for the policy."""
        return self.prompt if self.conditioned is None else self.conditioned.prompt

    @property
    def policy_request(self) -> "Request":
        """Return the request for the policy, with the conditioned prompt as its plain prompt."""
        return (
            self
            if self.conditioned is None
            else replace(self, prompt=self.policy_prompt, conditioned=None)
        )

    @property
    def user(self) -> str:
        """Return the id of the user, for a personalised policy; "" without a user."""
        return "" if self.conditioned is None else self.conditioned.user

    @cached_property
    def key(self) -> str:
        """Return a hash of 16 hexadecimal digits of the content, independent of file names.

        Groups, seeds, held-out splits and pairs use it. Conditioning does not change it.
        """
        mask = self.mask.digest if self.mask else ""
        content = self.prompt, [one.digest for one in self.references], mask, dict(self.metadata)
        serialised = json.dumps(content, sort_keys=True, default=str)
        return hashlib.sha256(serialised.encode()).hexdigest()[:16]

    @cached_property
    def input_digest(self) -> bytes:
        """Return a digest of the inputs of a policy: everything except the metadata.

        A prompt without other inputs has the digest of its text, which older caches use as key.
        """
        if not self.references and self.mask is None and not self.user:
            return hashlib.sha256(self.policy_prompt.encode()).digest()
        mask = self.mask.digest if self.mask else ""
        content = self.policy_prompt, [one.digest for one in self.references], mask
        content = (*content, self.user) if self.user else content
        return hashlib.sha256(json.dumps(content).encode()).digest()

    def __eq__(self, other: object) -> bool:
        """Return whether the keys of two requests are equal."""
        return isinstance(other, Request) and self.key == other.key

    def __hash__(self) -> int:
        """Return a hash of the key."""
        return hash(self.key)


def plain_requests(prompts: Iterable[str]) -> list[Request]:
    """Return requests that have only a prompt."""
    return [Request(prompt) for prompt in prompts]


def prompts_of(requests: Iterable[Request]) -> list[str]:
    """Return the prompts of requests, with duplicates."""
    return [request.prompt for request in requests]
