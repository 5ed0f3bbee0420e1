"""Implements UnifiedReward: scores of one image or video, or the better one of two.

Scores from 1 to 5 are the model's own scale. The bundled prompts request the published answer
formats in our wording. Use the published text (`template`) to obtain the scores of the papers;
CodeGoat24/UnifiedReward (read at ff6f520) has it under the MIT licence. For edits scored from 0 to
25, use `edit_score.EditScore` with UnifiedReward-Edit as its model.

Source: UnifiedReward, arXiv:2503.05236; -Think, arXiv:2505.03318.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from typing_extensions import override

from flowalign.types import MediaBatch, PositiveInt, RewardSpec
from reward_models.backbones.pixels import evenly, parts, resize, sample_frames
from reward_models.chat.chat_client import ChatAnswer, Messages
from reward_models.chat.judge import ChatJudge, Sampling
from reward_models.chat.pair_judges import PairJudge
from reward_models.chat.parsers import Unparsable, parse_score, strip_thoughts
from reward_models.chat.template import (
    Template,
    encode_frames,
    encode_images,
    encode_source,
    read_template,
)
from reward_models.chat.unified_answers import (
    parse_better,
    parse_better_after_thinking,
    parse_higher,
    parse_report,
    parse_shares,
    parse_thoughts,
)

AXES = ("alignment", "coherence", "style")
VIDEO_AXES = ("alignment", "physics", "style")
_LOW, _HIGH = 1.0, 5.0
_GIVEN = r"[\s*]*([-+\d.]\S*(?:\s*/\s*\S+)?)"
_AXIS = re.compile(
    rf"\b(alignment|coherence|physics|style)(?:\s+score)?\s*(?:\(1-5\))?\s*\**\s*:{_GIVEN}", re.I
)
_FINAL = re.compile(rf"final score\s*\**\s*:{_GIVEN}", re.I)
_PAIR = Sampling(max_tokens=4096)


def parse_axes(text: str) -> dict[str, float]:
    """Parse the axes in an answer such as `Style Score (1-5): 3.5`; the last of each axis counts.

    Raises:
        Unparsable: There is no axis, or a score is outside 1 to 5.
    """
    found = {name.lower(): rest for name, rest in _AXIS.findall(strip_thoughts(text))}
    if not found:
        raise Unparsable(f"no axis score in {text[:60]!r}")
    return {name: parse_score(rest, _LOW, _HIGH) for name, rest in found.items()}


def parse_final_score(text: str) -> float:
    """Parse the number after the first `Final Score:`, from 1 to 5."""
    found = _FINAL.search(strip_thoughts(text))
    if found is None:
        raise Unparsable(f"no final score in {text[:60]!r}")
    return parse_score(found[1], _LOW, _HIGH)


@dataclass(eq=False, repr=False)
class UnifiedRewardPoint(ChatJudge):
    """Scores an image or a video against its prompt from 1 to 5.

    `axes` (UnifiedReward 2.0) gives alignment, coherence and style of an image. `video` (2.0) gives
    alignment, physics and style of a video, from the first frame of each of `frames` equal parts.
    `final` (1.0) gives one overall score of an image. `squash` resizes images to a square with
    sides of this many pixels; Flow-GRPO uses 512.
    """

    form: Literal["axes", "video", "final"] = "axes"
    squash: PositiveInt | None = None
    sampling: Sampling = field(default=Sampling(max_tokens=512), kw_only=True)
    frames: PositiveInt = 16

    @override
    def read_wording(self) -> Template:
        return read_template(self.template or _POINT_FORMS[self.form][0], ("prompt", "media"))

    @override
    def declare(self) -> RewardSpec:
        name, axes = _POINT_FORMS[self.form]
        return RewardSpec(
            name=name,
            dims=axes,
            modality="video" if self.form == "video" else "image",
            scale=(_LOW, _HIGH),
            licence="MIT",
            needs=("prompt",),
        )

    def ask(self, sample: MediaBatch) -> Sequence[Messages]:
        """Return one conversation with the image, or with frames of the video."""
        frames = sample_frames(sample.media[0].detach(), self.frames, parts)
        if self.squash:
            frames = resize(frames, self.squash, self.squash, quantised=True)
        return [self.wording.render(prompt=sample.prompts[0], media=encode_images(frames))]

    def read(self, answers: Sequence[ChatAnswer]) -> Sequence[float]:
        """Return the scores in the answer."""
        if self.form == "final":
            return [parse_final_score(answers[0].text)]
        scores = parse_axes(answers[0].text)
        return [scores.get(axis, math.nan) for axis in self.spec.dims]


@dataclass(frozen=True)
class _PairForm:
    template: str
    dims: tuple[str, ...]
    read: Callable[[str], list[float]]
    modality: Literal["image", "video", "any"] = "any"
    choose: Callable[[int, int], list[int]] = evenly
    """Function that selects the frames of a video."""


def _think(text: str, *names: str) -> list[float]:
    return [parse_better_after_thinking(text), *parse_thoughts(text, names)]


_POINT_FORMS = {
    "axes": ("unified_reward_point", AXES),
    "video": ("unified_reward_video", VIDEO_AXES),
    "final": ("unified_reward_final", ("overall",)),
}
_PAIR_FORMS = {
    "plain": _PairForm("unified_reward_pair", ("overall",), lambda t: [parse_better(t)]),
    "think": _PairForm("unified_reward_think", ("overall",), lambda t: _think(t)),
    "think_image": _PairForm(
        "unified_reward_think",
        ("overall", "semantic", "aesthetics", "authenticity"),
        lambda t: _think(t, "semantic", "aesthetics", "authenticity"),
        "image",
    ),
    "think_video": _PairForm(
        "unified_reward_think_video",
        ("overall", "semantic", "temporal", "authenticity"),
        lambda t: _think(t, "semantic", "temporal", "authenticity"),
        "video",
    ),
    "score": _PairForm(
        "unified_reward_pair_score", AXES, lambda t: parse_shares(t, AXES), choose=parts
    ),
    "flex": _PairForm(
        "unified_reward_flex", ("overall", "semantic", "quality", "aesthetics"), parse_report
    ),
}
_EDIT_FORMS = {
    "rank": _PairForm(
        "unified_reward_edit_rank", ("overall",), lambda t: [parse_better(t)], "image"
    ),
    "score": _PairForm(
        "unified_reward_edit_score", ("overall",), lambda t: [parse_higher(t)], "image"
    ),
}


@dataclass(eq=False, repr=False)
class _FormJudge(PairJudge):
    """Judge of pairs that asks in one of several forms."""

    forms: ClassVar[Mapping[str, _PairForm]]
    slots = ("prompt", "first", "second")
    form: Any
    frames = 1

    @override
    def read_wording(self) -> Template:
        return read_template(self.template or self.forms[self.form].template, self.slots)

    @override
    def declare(self) -> RewardSpec:
        form = self.forms[self.form]
        return RewardSpec(
            name=form.template,
            dims=form.dims,
            modality=form.modality,
            scale=(0.0, 1.0),
            licence="MIT",
            needs=("prompt", "references") if "references" in self.slots else ("prompt",),
        )

    def ask(self, first: MediaBatch, second: MediaBatch) -> Sequence[Messages]:
        """Return one conversation with both samples, preceded by the source of edits."""
        choose = self.forms[self.form].choose
        shown = {
            "first": encode_frames(first, self.frames, choose),
            "second": encode_frames(second, self.frames, choose),
        }
        if "references" in self.slots:
            shown["references"] = encode_source(first)
        return [self.wording.render(prompt=first.prompts[0], **shown)]


@dataclass(eq=False, repr=False)
class UnifiedRewardPair(_FormJudge):
    """Compares two images, or two videos (as frames), by how well they fit the prompt.

    | form | UnifiedReward | dimensions |
    |---|---|---|
    | `plain` | 1.0 | winner |
    | `think` | -Think, which reasons first | winner |
    | `think_image`, `think_video` | -Think | winner, and higher score per aspect in its thoughts |
    | `score` | 2.0 | the first's share of alignment, coherence and style |
    | `flex` | -Flex, which chooses its own criteria | winner, and its share in three categories |
    """

    form: Literal["plain", "think", "think_image", "think_video", "score", "flex"] = "plain"
    frames: PositiveInt = 8
    sampling: Sampling = field(default=_PAIR, kw_only=True)
    forms = _PAIR_FORMS

    def read(self, answers: Sequence[ChatAnswer]) -> Sequence[float]:
        """Return the result of the first sample in each dimension."""
        return self.forms[self.form].read(answers[0].text)


@dataclass(eq=False, repr=False)
class UnifiedRewardEdit(_FormJudge):
    """Compares two edits of a source (the first reference) by how well they follow the instruction.

    `rank` asks UnifiedReward-Edit for a verdict; `score` asks for a score of each edit, and the
    higher score wins. The released example for scores only parses digits, a dot and digits, so it
    loses minus signs and ignores integers.
    """

    form: Literal["rank", "score"] = "rank"
    sampling: Sampling = field(default=_PAIR, kw_only=True)
    forms, slots = _EDIT_FORMS, ("prompt", "references", "first", "second")

    def read(self, answers: Sequence[ChatAnswer]) -> Sequence[float]:
        """Return the result of the first edit."""
        return self.forms[self.form].read(answers[0].text)
