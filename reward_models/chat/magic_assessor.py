"""Implements MagicAssessor: whether an image has physical artefacts, and of which kind."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flowalign.types import MediaBatch, PositiveInt, RewardSpec
from reward_models.chat.client import ChatAnswer, Messages, Server
from reward_models.chat.images import data_urls, with_shortest_side
from reward_models.chat.judge import ChatJudge
from reward_models.chat.judge_ensemble import JudgeEnsemble, Sampling, check_positive
from reward_models.chat.parsers import Unparsable, boxed, json_object
from reward_models.chat.template import describe, read_template

_SAMPLING = Sampling(max_tokens=2048)
_YES, _NO = ("true", "yes", "1"), ("false", "no", "0")


@dataclass(frozen=True)
class Assessment:
    """Holds the content of the answer's box."""

    normal: bool
    artefacts: tuple[str, ...]
    """Labels such as `L2: Abnormal Human Anatomy`."""


def read_assessment(text: str) -> Assessment:
    r"""Parse the verdict in the last \boxed{...}; labels of a normal image contradict it."""
    found = json_object(boxed(text))
    if "Whether Normal" not in found:
        raise Unparsable("no 'Whether Normal' in the box")
    normal = _truth(found["Whether Normal"])
    kinds = found.get("Type of Deformity", {})
    if not isinstance(kinds, dict):
        raise Unparsable(f"'Type of Deformity' is {str(kinds)[:60]!r}, not an object")
    artefacts = tuple(str(label) for label, is_there in kinds.items() if _truth(is_there))
    if normal and artefacts:
        raise Unparsable(f"normal, but with {', '.join(artefacts)}")
    return Assessment(normal, artefacts)


class MagicAssessor(ChatJudge):
    """Scores 1 where the image is free of artefacts, else 0; with passes, the share that say so.

    The image's shortest side is made `side` pixels. The prompt is a reconstruction that asks for
    the published answer format and labels; give the published text as `template`.
    """

    def __init__(
        self,
        server: Server,
        side: PositiveInt = 1024,
        template: str = "magic_assessor",
        sampling: Sampling = _SAMPLING,
    ):
        check_positive(side=side)
        self.side, self.template = side, read_template(template, ("media",))
        ensemble = JudgeEnsemble(server, sampling)
        spec = RewardSpec(
            name="magic_assessor",
            dims=("normal",),
            modality="image",
            scale=(0.0, 1.0),
            licence="unknown (the repository has no licence file)",
            version=ensemble.version(side=side, **describe(self.template)),
        )
        super().__init__(spec, ensemble)

    def ask(self, sample: MediaBatch) -> Sequence[Messages]:
        """Build one conversation with the image."""
        shown = with_shortest_side(sample.media[0].detach(), self.side)
        return [self.template.render(media=data_urls(shown))]

    def read(self, answers: Sequence[ChatAnswer]) -> Sequence[float]:
        """Return 1 for normal, 0 otherwise."""
        return [float(read_assessment(answers[0].text).normal)]


def _truth(value: Any) -> bool:
    word = str(value).strip().lower()
    if word not in (*_YES, *_NO):
        raise Unparsable(f"{word[:60]!r} is neither true nor false")
    return word in _YES
