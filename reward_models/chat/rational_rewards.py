"""Implements RationalRewards: an image, an edit, or a pair of them, judged by section with reasons.

Scores from 1 to 4 are mapped to 0 to 1. The bundled prompts request the published answer format in
our wording. Use the published text (`template`) to obtain the scores of the paper.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from typing_extensions import override

from flowalign.types import MediaBatch, RewardSpec
from reward_models.chat.chat_client import ChatAnswer, Messages
from reward_models.chat.judge import ChatJudge, Sampling
from reward_models.chat.pair_judges import PairJudge, compare_scores
from reward_models.chat.parsers import Unparsable, strip_thoughts
from reward_models.chat.template import Template, encode_frames, encode_source, read_template

T2I = {
    "text_faithfulness": "Text Faithfulness",
    "physical_quality": "Physical and Visual Quality",
    "text_rendering": "Text Rendering",
}
EDIT = {
    "text_faithfulness": "Text Faithfulness",
    "image_faithfulness": "Image Faithfulness",
    "physical_quality": "Physical and Visual Quality",
    "text_rendering": "Text Rendering",
}
"""Title of every dimension's section in the answer."""
_SECTIONS = {"t2i": T2I, "edit": EDIT}
_SCORE = re.compile(r"(?:##\s*)?score\s*:\s*(?:(N/A)|(\d+(?:\.\d+)?))", re.I)


def parse_sections(text: str, sections: Mapping[str, str]) -> dict[str, float]:
    """Parse the first score of every section; NaN if it is N/A, missing or unreadable."""
    return {name: _parse_first_score(body) for name, body in split_sections(text, sections).items()}


def split_sections(text: str, sections: Mapping[str, str]) -> dict[str, str]:
    """Return the text of every section, empty if the section is missing.

    Sections begin with `1. Text Faithfulness` and so on, in order. If no section is numbered, they
    begin with `Text Faithfulness:`. Everything from `# Summary:` on is ignored.
    """
    body = strip_thoughts(text).partition("# Summary:")[0]
    numbered = [rf"^[ \t]*{k}\.[^\n]*{re.escape(n)}" for k, n in enumerate(sections.values(), 1)]
    bare = [rf"{re.escape(name)}:" for name in sections.values()]
    patterns = numbered if any(re.search(p, body, re.M) for p in numbered) else bare
    found = [re.search(p, body, re.M) for p in patterns]
    starts = sorted(match.start() for match in found if match)
    bodies = {}
    for name, match in zip(sections, found, strict=True):
        end = next((s for s in starts if match and s > match.start()), len(body))
        bodies[name] = body[match.start() : end] if match else ""
    return bodies


def average_sections(scores: Mapping[str, float]) -> float:
    """Return (m - 1) / 3 for the mean m of the sections with a score, each clamped to 1 to 4.

    Raises:
        Unparsable: No section has a score.
    """
    given = [_clamp(score) for score in scores.values() if not math.isnan(score)]
    if not given:
        raise Unparsable("no section with a score")
    return (sum(given) / len(given) - 1) / 3


@dataclass(eq=False, repr=False)
class RationalRewards(ChatJudge):
    """Scores each section and their mean from 0 to 1; a section may not apply (N/A).

    `edit` compares with the source image, the first reference. `prefix` is put before the names of
    the dimensions, for runs in which another reward has the same names.
    """

    task: Literal["t2i", "edit"] = "t2i"
    sampling: Sampling = field(default=Sampling(temperature=0.1, max_tokens=2048), kw_only=True)
    prefix: str = ""

    @override
    def read_wording(self) -> Template:
        slots = ("prompt", "media", *(["references"] if self.task == "edit" else []))
        return read_template(self.template or f"rational_rewards_{self.task}", slots)

    @override
    def declare(self) -> RewardSpec:
        return RewardSpec(
            name=f"rational_rewards_{self.task}",
            dims=tuple(f"{self.prefix}{dim}" for dim in (*_SECTIONS[self.task], "overall")),
            modality="image",
            scale=(0.0, 1.0),
            licence="unknown (the repository has no licence file)",
            needs=("prompt", "references") if self.task == "edit" else ("prompt",),
            normalisation="clamped to 1 to 4, minus 1, divided by 3",
        )

    def ask(self, sample: MediaBatch) -> Sequence[Messages]:
        """Return one conversation with the image, preceded by its source for an edit."""
        before = {"references": encode_source(sample)} if self.task == "edit" else {}
        return [
            self.wording.render(prompt=sample.prompts[0], media=encode_frames(sample), **before)
        ]

    def read(self, answers: Sequence[ChatAnswer]) -> Sequence[float]:
        """Return the scores of the sections and overall, from 0 to 1."""
        scores = parse_sections(answers[0].text, _SECTIONS[self.task])
        each = [(_clamp(score) - 1) / 3 for score in scores.values()]
        return [*each, average_sections(scores)]


def _clamp(score: float) -> float:
    return score if math.isnan(score) else min(max(score, 1.0), 4.0)


def _parse_first_score(section: str) -> float:
    for line in section.splitlines():
        if found := _SCORE.search(line):
            return math.nan if found[1] else float(found[2])
    return math.nan


DIMS = ("text", "visual", "overall")
_NEUTRAL = 2.5
"""Score that replaces N/A, in the middle of the scale from 1 to 4."""
_VISUAL = ("image_faithfulness", "physical_quality")


def parse_pair(text: str, sections: Mapping[str, str]) -> dict[str, tuple[float, float]]:
    """Parse `Score A:` and `Score B:` of every section; N/A is 2.5.

    Raises:
        Unparsable: A score is missing or outside 1 to 4.
    """
    bodies = split_sections(text, _shorten_titles(sections))
    return {
        name: (_parse_score("A", body), _parse_score("B", body)) for name, body in bodies.items()
    }


def _shorten_titles(sections: Mapping[str, str]) -> dict[str, str]:
    return {name: title.replace(" and Visual", "") for name, title in sections.items()}


def sum_sections(scores: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """Sum A and B over text faithfulness, over the visual sections, and over all sections."""
    named = {
        "text": ["text_faithfulness"],
        "visual": [name for name in scores if name in _VISUAL],
        "overall": list(scores),
    }
    return {
        dim: (sum(scores[n][0] for n in names), sum(scores[n][1] for n in names))
        for dim, names in named.items()
    }


@dataclass(eq=False, repr=False)
class RationalPair(PairJudge):
    """Compares two images, or two edits of one source, by the totals of their section scores.

    The bundled prompt requests the published answer format in our wording. Use the published text
    (`template`) to obtain the scores of the paper.
    """

    task: Literal["t2i", "edit"] = "t2i"
    sampling: Sampling = field(default=Sampling(temperature=0.1, max_tokens=3072), kw_only=True)
    usual = "rational_rewards_pair"
    slots = ("prompt", "references", "first", "second", "criterion")

    @override
    def declare(self) -> RewardSpec:
        return RewardSpec(
            name=f"rational_pair_{self.task}",
            dims=DIMS,
            modality="image",
            scale=(0.0, 1.0),
            licence="unknown (the repository has no licence file)",
            needs=("prompt", "references") if self.task == "edit" else ("prompt",),
        )

    def ask(self, first: MediaBatch, second: MediaBatch) -> Sequence[Messages]:
        """Return one conversation with both images, preceded by their source for an edit."""
        titles = _shorten_titles(_SECTIONS[self.task]).values()
        return [
            self.wording.render(
                prompt=first.prompts[0],
                references=encode_source(first) if self.task == "edit" else [],
                first=encode_frames(first),
                second=encode_frames(second),
                criterion="\n".join(f"{k}. {title}:" for k, title in enumerate(titles, 1)),
            )
        ]

    def read(self, answers: Sequence[ChatAnswer]) -> Sequence[float]:
        """Return 1, 0 or 0.5 per dimension, depending on the image with the higher total."""
        scores = parse_pair(answers[0].text, _SECTIONS[self.task])
        return [compare_scores(*both) for both in sum_sections(scores).values()]


def _parse_score(which: str, section: str) -> float:
    found = re.search(rf"score {which}:[\s*~]*(?:(n/a)|(\d+(?:\.\d+)?))", section, re.I)
    if found is None:
        raise Unparsable(f"no score of {which} in {section[:60]!r}")
    score = _NEUTRAL if found[1] else float(found[2])
    if not 1 <= score <= 4:
        raise Unparsable(f"a score of {score:g}, outside [1, 4]")
    return score
