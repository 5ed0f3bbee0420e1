"""Define requests, and the batches of media that answer them and that reward models score."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.utils.media.media import Sound


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


@dataclass(frozen=True)
class MediaBatch:
    """Images or videos of one shape with their prompts and metadata: the input of reward models."""

    media: Float[Tensor, "n F 3 H W"]
    """RGB in [0, 1]; an image is a video of one frame. Differentiable rewards propagate gradients
    to media that require one."""
    prompts: Sequence[str]
    """Prompt of each sample."""
    metadata: Sequence[Mapping[str, Any]] = ()
    """Further columns of the prompt's row, one mapping per sample, or empty."""
    fps: Sequence[float] = ()
    """Frames per second of each sample, or empty where unknown."""
    references: Sequence[Sequence[Float[Tensor, "3 _ _"]]] = ()
    """Source or reference images of each sample (editing, image to video), or empty; for a clip
    its first frame."""
    groups: Sequence[int] = ()
    """Group ids, or empty; group-wise models compare samples with the same id."""
    masks: Sequence[Float[Tensor, "1 _ _"] | None] = ()
    """Region of the first reference that may change, in [0, 1]; None for a sample without a mask;
    empty if no sample has one."""
    sound: Sequence[Sound | None] = ()
    """Sound of each clip; None for a clip without; empty if no clip has one, or no reward needs
    it."""

    def __len__(self) -> int:
        return len(self.media)

    def take(self, rows: Sequence[int]) -> "MediaBatch":
        """Return samples `rows` in that order; consecutive rows share this batch's memory."""
        columns = dict(vars(self))
        media = _rows(columns.pop("media"), rows)
        picked = {n: [column[i] for i in rows] if column else () for n, column in columns.items()}
        return MediaBatch(media, **picked)

    def chunks(self, size: int) -> list["MediaBatch"]:
        """Return the same samples in batches of at most `size`."""
        starts = range(0, len(self), size)
        return [self.take(range(i, min(i + size, len(self)))) for i in starts]

    @staticmethod
    def concat(batches: Sequence["MediaBatch"]) -> "MediaBatch":
        """Return the samples of several batches, one after another.

        If only some batches have metadata, references, masks or sound, samples of the remaining
        batches get empty ones.
        """
        if len(batches) == 1:
            return batches[0]

        def join(name: str) -> list[Any]:
            columns = [getattr(batch, name) for batch in batches]
            fills = any(columns) and name in _FILLED
            empty = [_FILLED[name]] if fills else []
            pairs = zip(columns, batches, strict=True)
            return [one for column, batch in pairs for one in column or empty * len(batch)]

        names = [one.name for one in fields(MediaBatch)[1:]]
        media = torch.cat([batch.media for batch in batches])
        return MediaBatch(media, **{name: join(name) for name in names})


_FILLED = {"metadata": {}, "references": (), "masks": None, "sound": None}
"""Values of samples without a column that other samples have."""


def _rows(media: Float[Tensor, "n F 3 H W"], rows: Sequence[int]) -> Float[Tensor, "m F 3 H W"]:
    """Return samples `rows`; consecutive rows are not copied, because videos are large."""
    if rows and list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return media[rows[0] : rows[0] + len(rows)]
    return media[list(rows)]
