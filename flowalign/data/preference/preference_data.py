"""Define preference data: pairs, samples and segments, and rules that choose and weight pairs.

Online DPO applies the rules to its rollouts, `flowalign pairs` to scored files.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from flowalign.functional import pairing
from flowalign.types import ConditionedPrompt, PromptConditioning, Reference, Request
from flowalign.utils.errors import require_known
from flowalign.utils.media.media import Media
from flowalign.utils.ranges import FiniteFloat, NonNegativeFloat, PositiveInt, require_ranges


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
    """Return a request without its prompt and words.

    Most policies guide away from it; SDXL, Qwen-Image and Sana guide away from another input.
    """
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


Indices = tuple[Int[Tensor, "m"], Int[Tensor, "m"]]


class Rule(ABC):
    """Rule that pairs the samples of one prompt by their scores."""

    def __post_init__(self) -> None:
        """Reject settings outside the ranges of their types, if the rule is a dataclass."""
        require_ranges(self, "rule")

    @abstractmethod
    def most(self, num_samples: int) -> int:
        """Return the largest possible number of pairs among `num_samples` samples of a prompt."""

    @abstractmethod
    def pairs(self, scores: Float[Tensor, "K R"], total: Float[Tensor, "K"]) -> Indices:
        """Return the indices of winners and losers; samples with NaN scores are skipped.

        `total` is the weighted sum of the rewards of each sample.
        """


@dataclass(frozen=True, kw_only=True)
class BestWorst(Rule):
    """Best sample against the worst, unless their scores are equal; online DPO of Flow-GRPO."""

    count: PositiveInt = 1
    """Number of pairs per prompt: best against worst, second best against second worst, ..."""
    min_gap: NonNegativeFloat = 0.0
    """Smallest difference between the weighted reward sums of a pair."""

    @override
    def most(self, num_samples: int) -> int:
        return min(self.count, num_samples // 2)

    @override
    def pairs(self, scores: Float[Tensor, "K R"], total: Float[Tensor, "K"]) -> Indices:
        return pairing.pair_extremes(total, self.count, self.min_gap)


@dataclass(frozen=True, kw_only=True)
class Gap(Rule):
    """All pairs of samples with a difference of at least `min_gap` in weighted reward sum."""

    min_gap: NonNegativeFloat = 0.0

    @override
    def most(self, num_samples: int) -> int:
        return num_samples * (num_samples - 1) // 2

    @override
    def pairs(self, scores: Float[Tensor, "K R"], total: Float[Tensor, "K"]) -> Indices:
        return pairing.pair_over_gap(total, self.min_gap)


@dataclass(frozen=True, kw_only=True)
class Dominance(Rule):
    """All pairs in which the winner is worse in no dimension and better in the weighted sum (MPO).

    Source: VisionReward, arXiv:2412.21059.
    """

    min_gap: NonNegativeFloat = 0.0
    """Smallest difference between the weighted reward sums of a pair."""
    tolerance: NonNegativeFloat = 0.0
    """Largest amount by which a winner may be worse in a dimension, in units of its score."""

    @override
    def most(self, num_samples: int) -> int:
        return num_samples * (num_samples - 1) // 2

    @override
    def pairs(self, scores: Float[Tensor, "K R"], total: Float[Tensor, "K"]) -> Indices:
        return pairing.pair_dominating(scores, total, self.tolerance, self.min_gap)


@dataclass(frozen=True, kw_only=True)
class GapWeights:
    """Pair weights alpha^R(chosen) - alpha^R(rejected), R a score scaled to [0, 1] (GAPO).

    R is scaled over the whole dataset. A pair that contradicts its scores gets weight 0.

    Source: AnimeReward, arXiv:2504.10044, with alpha 2 (from a secondary source).
    """

    scores: Mapping[str, FiniteFloat]
    """Weight of each dimension in the score R, a weighted sum."""
    alpha: NonNegativeFloat = 2.0
    """Base of the power, above 1. A larger base gives more weight to gaps between high scores."""

    def __post_init__(self) -> None:
        """Raise ValueError for settings that give every pair weight 0."""
        if not self.scores or not self.alpha > 1:
            raise ValueError(
                f"data.weighting: scores {dict(self.scores)}, alpha {self.alpha}; "
                "need at least one dimension, and alpha above 1"
            )

    def weigh(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Return the pairs with their weights multiplied by the weight of their gap.

        Raises:
            ValueError: A score is missing.
        """
        sides = [[p.chosen for p in pairs], [p.rejected for p in pairs]]
        scores = [self._score(s, p) for side in sides for s, p in zip(side, pairs, strict=True)]
        value = torch.tensor(scores)[:, None]
        one_group = torch.zeros(len(scores), dtype=torch.long)
        scaled = pairing.unit_range(value, value.isfinite(), one_group)[:, 0]
        chosen, rejected = scaled.chunk(2)
        weights = pairing.gap_weights(chosen, rejected, self.alpha).clamp(min=0).tolist()
        return [replace(p, weight=p.weight * w) for p, w in zip(pairs, weights, strict=True)]

    def _score(self, sample: Sample, pair: Pair) -> float:
        needs = f"{pair.where}: data.weighting.scores needs a score that is missing,"
        require_known(needs, self.scores, sample.scores)
        return sum(weight * sample.scores[dim] for dim, weight in self.scores.items())
