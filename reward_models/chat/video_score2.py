"""Implements VideoScore2: visual quality, prompt alignment and physical plausibility of a video.

`upstream` weights the digits as its released code does. The bundled prompt requests the published
answer format in our wording. Use the published text (`template`) to obtain the scores of the paper.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

from typing_extensions import override

from flowalign.types import MediaBatch, PositiveFloat, RewardSpec
from reward_models.backbones.pixels import at_rate
from reward_models.chat.chat_client import ChatAnswer, Messages
from reward_models.chat.judge import ChatJudge, Sampling
from reward_models.chat.parsers import Unparsable, parse_score, strip_thoughts, word_probabilities
from reward_models.chat.template import encode_images

DIMS = ("visual_quality", "text_alignment", "physical_consistency")
_TITLES = ("visual quality", "text-to-video alignment", "physical/common-sense consistency")
_NUMBERED = re.compile(
    ".*?".join(rf"\({k}\)\s*{t}[^\d]*?(\d+)(?!\.?\w)" for k, t in enumerate(_TITLES, 1)),
    re.I | re.S,
)
_PLAIN = re.compile(".*?".join(rf"{t}:\s*(\d+)(?!\.?\w)" for t in _TITLES), re.I | re.S)
_DIGITS = ("1", "2", "3", "4", "5")


def find_scores(text: str) -> list[tuple[int, str]]:
    """Return the start and the text of each of the three integer scores from 1 to 5."""
    thought = len(text) - len(strip_thoughts(text))
    found = _NUMBERED.search(text, thought) or _PLAIN.search(text, thought)
    if found is None:
        raise Unparsable("no three scores")
    for number in found.groups():
        parse_score(number, 1.0, 5.0)
    return [(found.start(k), found[k]) for k in (1, 2, 3)]


def soft_scores(answer: ChatAnswer, mode: Literal["expectation", "upstream"]) -> list[float]:
    """Return the three scores from the probabilities of digits 1 to 5 at the score positions.

    expectation: sum of digit * share. upstream: the likeliest digit times its share, as released.
    It is not an expectation: a share of 0.4 for 5 gives 2.0, less than a certain 3.
    """
    pieces = [token for token, _ in answer.tokens]
    ends = list(accumulate(len(piece) for piece in pieces))
    scores = []
    for start, _ in find_scores("".join(pieces)):
        token = next(i for i, end in enumerate(ends) if end > start)
        weights = word_probabilities(answer, token, _DIGITS)
        weighed = [digit * weight for digit, weight in enumerate(weights, 1)]
        best = weights.index(max(weights))
        scores.append(sum(weighed) if mode == "expectation" else weighed[best])
    return scores


@dataclass(eq=False, repr=False)
class VideoScore2(ChatJudge):
    """Scores a video in three dimensions, from 1 to 5 (`upstream`: from 0.2).

    `integer` takes the numbers as written; `expectation` and `upstream` weight digits by their
    probability. The video is shown as separate frames at `fps` per second, because a server that
    receives data URLs reads them as images, without a video's positions.
    """

    mode: Literal["expectation", "upstream", "integer"] = "expectation"
    fps: PositiveFloat = 2.0
    sampling: Sampling = field(default=Sampling(temperature=0.7), kw_only=True)
    usual = "video_score2"

    @override
    def more_parameters(self) -> Mapping[str, Any]:
        return {} if self.mode == "integer" else {"logprobs": True, "top_logprobs": 20}

    @override
    def declare(self) -> RewardSpec:
        return RewardSpec(
            name="video_score2",
            dims=DIMS,
            modality="video",
            scale=(0.0 if self.mode == "upstream" else 1.0, 5.0),
            licence="Apache-2.0",
            needs=("prompt", "fps"),
        )

    def ask(self, sample: MediaBatch) -> Sequence[Messages]:
        """Return one conversation with the frames."""
        video = sample.media[0].detach()
        shown = video[at_rate(len(video), sample.fps[0], self.fps)]
        return [self.wording.render(prompt=sample.prompts[0], media=encode_images(shown))]

    def read(self, answers: Sequence[ChatAnswer]) -> Sequence[float]:
        """Return the three scores in the selected mode."""
        if self.mode == "integer":
            return [float(number) for _, number in find_scores(answers[0].text)]
        if not answers[0].tokens:
            raise Unparsable("the server sent no log-probabilities")
        return soft_scores(answers[0], self.mode)
