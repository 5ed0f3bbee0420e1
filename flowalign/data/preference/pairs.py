"""Defines preference data as read from a dataset: pairs, samples, and labelled segments."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from flowalign.data.media.media import Media
from flowalign.types import ConditionedPrompt, PromptConditioning, Reference, Request


@dataclass(frozen=True)
class Sample:
    """Holds one medium that answers a prompt, with its scores and labels."""

    prompt: str
    media: Media
    scores: Mapping[str, float] = field(default_factory=dict)
    """Score per dimension; higher is better."""
    desirable: bool | None = None
    """A person's thumb up (true) or down (false); null: not judged."""
    user: str = ""
    """Identifier of the person who judged it; empty: unknown."""
    weight_map: str | None = None
    """A safetensors file with the importance of every place, see `functional.maps`."""
    references: tuple[Reference, ...] = ()
    """Sources of an edit, or a first frame."""
    mask: Reference | None = None
    """Where the first of them was to be painted anew."""
    conditioned: ConditionedPrompt | None = None
    """How a policy is asked for it; null: by the prompt alone."""

    @property
    def request(self) -> Request:
        """The request that the medium answers, without metadata."""
        return Request(self.prompt, self.references, self.mask, conditioned=self.conditioned)


@dataclass(frozen=True)
class Segment:
    """Labels the latent frames [start, stop) of a pair with the medium that is better there."""

    start: int
    stop: int
    label: int
    """1: the chosen medium, -1: the rejected one, 0: neither."""


@dataclass(frozen=True)
class Pair:
    """Holds two media that answer one prompt, one of them preferred."""

    chosen: Sample
    rejected: Sample
    dimension: str = "overall"
    """Dimension in which it is preferred."""
    gap: float | None = None
    """Lead of the chosen medium, in units of the score that decided; null: unknown."""
    weight: float = 1.0
    """Factor of the pair's loss."""
    stage: int = 0
    """Stage of a curriculum; earlier ones are easier."""
    segments: Sequence[Segment] = ()
    mask: str | None = None
    """A safetensors file that says where the two differ, see `functional.maps`."""
    mask_rejected: str | None = None
    """That of the rejected medium, where each has its own; null: that of both."""
    mask_strength: float = 1.0
    """Factor of the errors within the mask."""
    targets: tuple[str, str] | None = None
    """Prompts under which an expert says what winner and loser are matched to; null: the data."""
    user: str = ""
    """Identifier of the person who preferred it; empty: unknown."""
    where: str = ""
    """File and row that it was read from, for messages."""

    @property
    def prompt(self) -> str:
        """The prompt that both media answer."""
        return self.chosen.prompt


Kind = Literal["pairs", "samples", "attributes", "captions"]
"""Kind of the rows of a dataset: pairs, samples with binary labels, media that are compared with
themselves under texts of good and bad attributes, and samples of these with both in the prompt."""
Keep = Callable[[Media], Media]
"""Replaces a medium that is used, such as by one without its bytes, once these were validated."""
Example = Pair | Sample
"""One element of preference data."""


def samples_of(example: Example) -> tuple[Sample, ...]:
    """The samples of an example: winner and loser of a pair, or the sample itself."""
    return (example.chosen, example.rejected) if isinstance(example, Pair) else (example,)


def media_of(example: Example) -> list[Media]:
    """The media of an example: two for a pair, one for a sample."""
    return [sample.media for sample in samples_of(example)]


def requests_of(example: Example) -> list[Request]:
    """The requests of an example that have to be encoded: its own, and those of its targets."""
    request = samples_of(example)[0].request
    targets = example.targets if isinstance(example, Pair) else None
    return [
        request,
        *(replace(request, conditioned=ConditionedPrompt(text)) for text in targets or ()),
    ]


def collect_requests(examples: Iterable[Example], drops_prompts: bool) -> list[Request]:
    """The different requests to encode for examples, those with a dropped prompt too."""
    asked = [request for example in examples for request in requests_of(example)]
    empty = [clear_prompt(r) for r in asked if drops_prompts or not r.references]
    different = {request.input_digest: request for request in (*asked, *empty)}
    return sorted(
        different.values(), key=lambda request: (request.policy_prompt, request.input_digest)
    )


def clear_prompt(request: Request) -> Request:
    """Return a request without its prompt and words, as guidance sees it."""
    return replace(request, prompt="", conditioned=None)


def condition_example(example: Example, conditioning: PromptConditioning) -> Example:
    """Return an example under the prompts that a policy is asked with.

    A sample says how good it is; the media of a pair answer what a user asks.
    """
    if isinstance(example, Sample):
        asked = conditioning.for_training(example.request, example.scores)
        return replace(example, conditioned=asked.conditioned)
    conditioned = conditioning.for_inference(example.chosen.request).conditioned
    sides = (replace(sample, conditioned=conditioned) for sample in samples_of(example))
    return replace(example, **dict(zip(("chosen", "rejected"), sides, strict=True)))
