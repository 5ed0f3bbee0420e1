"""Define preference data as read from a dataset: pairs, samples and labelled segments."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from flowalign.data.media.media import Media
from flowalign.types import ConditionedPrompt, PromptConditioning, Reference, Request


@dataclass(frozen=True)
class Sample:
    """Image or video for a prompt, with its scores and labels."""

    prompt: str
    media: Media
    scores: Mapping[str, float] = field(default_factory=dict)
    """Score per dimension; higher is better."""
    desirable: bool | None = None
    """Label of an annotator: true for thumbs-up, false for thumbs-down; null: not judged."""
    user: str = ""
    """Id of the annotator; empty: unknown."""
    weight_map: str | None = None
    """Safetensors file with the importance of every position, see `functional.maps`; or null."""
    references: tuple[Reference, ...] = ()
    """Source images of an edit, or the first frame of a video."""
    mask: Reference | None = None
    """Inpainting mask of the first reference; null: none."""
    conditioned: ConditionedPrompt | None = None
    """Input of the policy; null: the prompt alone."""

    @property
    def request(self) -> Request:
        """Return the request of the sample, without metadata."""
        return Request(self.prompt, self.references, self.mask, conditioned=self.conditioned)


@dataclass(frozen=True)
class Segment:
    """Latent frames [start, stop) of a pair, with a label for the better item."""

    start: int
    stop: int
    label: int
    """Better item. 1: the chosen one, -1: the rejected one, 0: neither."""


@dataclass(frozen=True)
class Pair:
    """Preferred and rejected image or video for one prompt."""

    chosen: Sample
    rejected: Sample
    dimension: str = "overall"
    """Dimension of the preference (default: overall)."""
    gap: float | None = None
    """Lead of the chosen item, in units of the deciding score; null: unknown."""
    weight: float = 1.0
    """Factor on the loss of the pair."""
    stage: int = 0
    """Stage of a curriculum; earlier stages are easier."""
    segments: Sequence[Segment] = ()
    mask: str | None = None
    """Safetensors file with a mask of the differing region, see `functional.maps`; or null."""
    mask_rejected: str | None = None
    """Mask file of the rejected item; null: `mask` applies to both items."""
    mask_strength: float = 1.0
    """Factor on the errors inside the mask."""
    targets: tuple[str, str] | None = None
    """Prompts under which an expert predicts the targets of winner and loser; null: the targets are
    the data."""
    values_chosen: Sequence[float] = ()
    """Values of the denoising states 0 to T of the chosen item; empty: unknown."""
    values_rejected: Sequence[float] = ()
    """Values of the denoising states 0 to T of the rejected item; empty: unknown."""
    user: str = ""
    """Id of the annotator; empty: unknown."""
    where: str = ""
    """File and row of the pair, for messages."""

    @property
    def prompt(self) -> str:
        """Return the prompt of both items."""
        return self.chosen.prompt


Kind = Literal["pairs", "samples", "attributes", "captions"]
"""Kind of the rows of a dataset.

pairs: preference pairs. samples: samples with binary labels. attributes: images or videos paired
with themselves under texts of good and bad attributes. captions: samples with both texts in the
prompt.
"""
Keep = Callable[[Media], Media]
"""Function that replaces a validated media item, for example by one without its bytes."""
Example = Pair | Sample
"""One element of preference data."""


def samples_of(example: Example) -> tuple[Sample, ...]:
    """Return the samples of an example: winner and loser of a pair, or the sample itself."""
    return (example.chosen, example.rejected) if isinstance(example, Pair) else (example,)


def media_of(example: Example) -> list[Media]:
    """Return the media in an example: two for a pair, one for a sample."""
    return [sample.media for sample in samples_of(example)]


def requests_of(example: Example) -> list[Request]:
    """Return the requests of an example to encode: its request, then its targets."""
    request = samples_of(example)[0].request
    targets = example.targets if isinstance(example, Pair) else None
    return [
        request,
        *(replace(request, conditioned=ConditionedPrompt(text)) for text in targets or ()),
    ]


def collect_requests(examples: Iterable[Example], drops_prompts: bool) -> list[Request]:
    """Return the distinct requests to encode for examples, including requests without a prompt."""
    asked = [request for example in examples for request in requests_of(example)]
    empty = [clear_prompt(r) for r in asked if drops_prompts or not r.references]
    different = {request.input_digest: request for request in (*asked, *empty)}
    return sorted(
        different.values(), key=lambda request: (request.policy_prompt, request.input_digest)
    )


def clear_prompt(request: Request) -> Request:
    """Return a request without its prompt and words, as guidance uses it."""
    return replace(request, prompt="", conditioned=None)


def condition_example(example: Example, conditioning: PromptConditioning) -> Example:
    """Return an example with the conditioned prompt of the policy.

    A sample is conditioned on its scores as in training, both items of a pair as in inference.
    """
    if isinstance(example, Sample):
        asked = conditioning.for_training(example.request, example.scores)
        return replace(example, conditioned=asked.conditioned)
    conditioned = conditioning.for_inference(example.chosen.request).conditioned
    sides = (replace(sample, conditioned=conditioned) for sample in samples_of(example))
    return replace(example, **dict(zip(("chosen", "rejected"), sides, strict=True)))
