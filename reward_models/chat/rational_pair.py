"""Implements RationalRewards as a judge of pairs: one answer scores both images by section."""

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from flowalign.types import MediaBatch, RewardSpec
from reward_models.chat.chat_client import ChatAnswer, Messages, Server
from reward_models.chat.images import encode_frames, encode_source
from reward_models.chat.judge_ensemble import JudgeEnsemble, Sampling, check_known
from reward_models.chat.pair_judges import PairJudge
from reward_models.chat.parsers import Unparsable
from reward_models.chat.rational_rewards import EDIT, T2I, split_sections
from reward_models.chat.template import describe, read_template

DIMS = ("text", "visual", "overall")
_NEUTRAL = 2.5
"""Score that replaces N/A, in the middle of the scale from 1 to 4."""
_VISUAL = ("image_faithfulness", "physical_quality")
_SAMPLING = Sampling(temperature=0.1, max_tokens=3072)


def parse_pair(text: str, sections: Mapping[str, str]) -> dict[str, tuple[float, float]]:
    """Parse `Score A:` and `Score B:` of every section; N/A is 2.5.

    Raises:
        Unparsable: A score is missing or outside 1 to 4.
    """
    titles = {name: title.replace(" and Visual", "") for name, title in sections.items()}
    bodies = split_sections(text, titles)
    return {
        name: (_parse_score("A", body), _parse_score("B", body)) for name, body in bodies.items()
    }


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


class RationalPair(PairJudge):
    """Compares two images, or two edits of one source, by the totals of their section scores.

    The bundled prompt requests the published answer format in our wording. Use the published text
    (`template`) to obtain the scores of the paper.
    """

    def __init__(
        self,
        server: Server,
        task: Literal["t2i", "edit"] = "t2i",
        template: str = "rational_rewards_pair",
        sampling: Sampling = _SAMPLING,
    ):
        check_known("task", task, ("t2i", "edit"))
        self.task, self.sections = task, EDIT if task == "edit" else T2I
        slots = ("prompt", "references", "first", "second", "criterion")
        self.template = read_template(template, slots)
        ensemble = JudgeEnsemble(server, sampling)
        spec = RewardSpec(
            name=f"rational_pair_{task}",
            dims=DIMS,
            modality="image",
            scale=(0.0, 1.0),
            licence="unknown (the repository has no licence file)",
            needs=("prompt", "references") if task == "edit" else ("prompt",),
            version=ensemble.version(task=task, **describe(self.template)),
        )
        super().__init__(spec, ensemble)

    def ask(self, first: MediaBatch, second: MediaBatch) -> Sequence[Messages]:
        """Return one conversation with both images, preceded by their source for an edit."""
        titles = [title.replace(" and Visual", "") for title in self.sections.values()]
        return [
            self.template.render(
                prompt=first.prompts[0],
                references=encode_source(first) if self.task == "edit" else [],
                first=encode_frames(first),
                second=encode_frames(second),
                criterion="\n".join(f"{k}. {title}:" for k, title in enumerate(titles, 1)),
            )
        ]

    def read(self, answers: Sequence[ChatAnswer]) -> Sequence[float]:
        """Return 1, 0 or 0.5 per dimension, depending on the image with the higher total."""
        sums = sum_sections(parse_pair(answers[0].text, self.sections)).values()
        return [0.5 if a == b else float(a > b) for a, b in sums]


def _parse_score(which: str, section: str) -> float:
    found = re.search(rf"score {which}:[\s*~]*(?:(n/a)|(\d+(?:\.\d+)?))", section, re.I)
    if found is None:
        raise Unparsable(f"no score of {which} in {section[:60]!r}")
    score = _NEUTRAL if found[1] else float(found[2])
    if not 1 <= score <= 4:
        raise Unparsable(f"a score of {score:g}, outside [1, 4]")
    return score
