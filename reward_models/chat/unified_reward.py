"""Implements UnifiedReward: scores of one image, or which of two is better.

Scores from 1 to 5 are the model's own scale. The bundled prompts ask for the published answer
formats in our words; scores are those of the papers only under the published text (`template`).
"""

import math
import re
from collections.abc import Sequence
from typing import Literal

from flowalign.types import MediaBatch, PositiveInt, RewardSpec
from reward_models.chat.client import ChatAnswer, Messages, Server
from reward_models.chat.images import data_urls, shown, squashed
from reward_models.chat.judge import ChatJudge
from reward_models.chat.judge_ensemble import JudgeEnsemble, Sampling, check_known, check_positive
from reward_models.chat.pairs import PairJudge, winner
from reward_models.chat.parsers import Unparsable, score_in, verdict
from reward_models.chat.template import describe, read_template

AXES = ("alignment", "coherence", "style")
_LOW, _HIGH = 1.0, 5.0
_GIVEN = r"[\s*]*([-+\d.]\S*(?:\s*/\s*\S+)?)"
_AXIS = re.compile(
    rf"\b(alignment|coherence|style)(?:\s+score)?\s*(?:\(1-5\))?\s*\**\s*:{_GIVEN}", re.I
)
_FINAL = re.compile(rf"final score\s*\**\s*:{_GIVEN}", re.I)
_CLEAR = re.compile(r"(?:image|video) ([12]) is better|(equally good)", re.I)
_ANSWER = re.compile(r"<answer>\s*(?:(?:image|video) ([12]) is better|(tie))\.?\s*</answer>", re.I)
_POINT = Sampling(max_tokens=512)
_PAIR = Sampling(max_tokens=4096)


def axis_scores(text: str) -> dict[str, float]:
    """Parse the axes in an answer such as `Style Score (1-5): 3.5`; the last of each counts.

    Raises:
        Unparsable: it names none, or a score is outside 1 to 5.
    """
    found = {name.lower(): rest for name, rest in _AXIS.findall(verdict(text))}
    if not found:
        raise Unparsable(f"no axis score in {text[:60]!r}")
    return {name: score_in(rest, _LOW, _HIGH) for name, rest in found.items()}


def final_score(text: str) -> float:
    """Parse the number after the first `Final Score:`, from 1 to 5."""
    found = _FINAL.search(verdict(text))
    if found is None:
        raise Unparsable(f"no final score in {text[:60]!r}")
    return score_in(found[1], _LOW, _HIGH)


def better_of_two(text: str) -> float:
    """Return 1 where `Image 1 is better`, 0 where 2 is, 0.5 where both are equally good."""
    return winner(_CLEAR.findall(verdict(text)))


def better_after_thinking(text: str) -> float:
    """Return the same, read from within <answer> and </answer> only."""
    return winner(_ANSWER.findall(verdict(text)))


class UnifiedRewardPoint(ChatJudge):
    """Scores an image against its prompt from 1 to 5.

    `axes` (UnifiedReward 2.0) gives alignment, coherence and style; `final` (1.0) one overall
    score. `squash` resizes to a square with sides of that many pixels, Flow-GRPO's choice with 512.
    """

    def __init__(
        self,
        server: Server,
        form: Literal["axes", "final"] = "axes",
        template: str | None = None,
        squash: PositiveInt | None = None,
        sampling: Sampling = _POINT,
    ):
        check_known("form", form, ("axes", "final"))
        check_positive(squash=squash)
        name = "unified_reward_point" if form == "axes" else "unified_reward_final"
        self.form, self.squash = form, squash
        self.template = read_template(template or name, ("prompt", "media"))
        ensemble = JudgeEnsemble(server, sampling)
        spec = RewardSpec(
            name=name,
            dims=AXES if form == "axes" else ("overall",),
            modality="image",
            scale=(_LOW, _HIGH),
            licence="MIT",
            needs=("prompt",),
            version=ensemble.version(form=form, squash=squash, **describe(self.template)),
        )
        super().__init__(spec, ensemble)

    def ask(self, sample: MediaBatch) -> Sequence[Messages]:
        """Build one conversation with the image."""
        frames = sample.media[0].detach()
        frames = frames if self.squash is None else squashed(frames, self.squash)
        return [self.template.render(prompt=sample.prompts[0], media=data_urls(frames))]

    def read(self, answers: Sequence[ChatAnswer]) -> Sequence[float]:
        """Return the scores that the answer names."""
        if self.form == "final":
            return [final_score(answers[0].text)]
        scores = axis_scores(answers[0].text)
        return [scores.get(axis, math.nan) for axis in AXES]


class UnifiedRewardPair(PairJudge):
    """Says which of two images, or of two videos (in frames), fits the prompt better.

    `plain` is UnifiedReward 1.0; `think` reasons first.
    """

    def __init__(
        self,
        server: Server,
        form: Literal["plain", "think"] = "plain",
        template: str | None = None,
        frames: PositiveInt = 8,
        sampling: Sampling = _PAIR,
    ):
        check_known("form", form, ("plain", "think"))
        check_positive(frames=frames)
        name = "unified_reward_pair" if form == "plain" else "unified_reward_think"
        self.form, self.frames = form, frames
        self.template = read_template(template or name, ("prompt", "first", "second"))
        ensemble = JudgeEnsemble(server, sampling)
        spec = RewardSpec(
            name=name,
            dims=("overall",),
            modality="any",
            scale=(0.0, 1.0),
            licence="MIT",
            needs=("prompt",),
            version=ensemble.version(form=form, frames=frames, **describe(self.template)),
        )
        super().__init__(spec, ensemble)

    def ask(self, first: MediaBatch, second: MediaBatch) -> Sequence[Messages]:
        """Build one conversation with both."""
        one, two = shown(first, self.frames), shown(second, self.frames)
        return [self.template.render(prompt=first.prompts[0], first=one, second=two)]

    def read(self, answers: Sequence[ChatAnswer]) -> Sequence[float]:
        """Return the winner."""
        text = answers[0].text
        return [better_after_thinking(text) if self.form == "think" else better_of_two(text)]
