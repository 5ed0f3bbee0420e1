"""Implements EditScore, which rates an edit: success, unchanged rest, and image quality.

The computation follows its released code, except that an unreadable answer is a failure. The
bundled prompts request the published answer format in our wording. Use the published texts
(`template`, `pq_template`) to obtain the scores of the paper.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.types import MediaBatch, RewardSpec
from reward_models.chat.chat_client import ChatAnswer, Messages
from reward_models.chat.judge import ChatJudge, Sampling
from reward_models.chat.parsers import parse_scores
from reward_models.chat.template import Template, encode_frames, encode_source, read_template

DIMS = ("prompt_following", "consistency", "perceptual_quality", "overall")
HIGHEST = 25.0
Reduction = Literal["average_last", "average_first", "average_first_following"]


def parse_answers(consistency: str, quality: str) -> list[float]:
    """Return success, faithfulness, their minimum SC, and quality PQ (also a minimum), in [0, 10].

    The first text scores success and over-editing, the second naturalness and artefacts, each from
    0 to 25. If a text holds only one number, it is used for both, and faithfulness is NaN.
    """
    edit, look = (parse_scores(text, 0.0, HIGHEST) for text in (consistency, quality))
    faithful = edit[1] if len(edit) == 2 else torch.nan
    return [10 * x / HIGHEST for x in (edit[0], faithful, min(edit), min(look))]


def reduce_passes(
    passes: Float[Tensor, "k 4"], reduction: Reduction = "average_last"
) -> Float[Tensor, "4"]:
    """Reduce the output of `EditScore.read` over k passes to the dimensions.

    Overall is sqrt(SC * PQ). average_last: mean of the overall of every pass. average_first:
    overall of the mean SC and PQ. average_first_following: the same with the mean of
    prompt_following instead of SC. The reference does this when it scores one image, so
    over-editing then costs nothing.
    """
    following, faithful, sc, pq = passes.unbind(1)
    overall = {
        "average_last": (sc * pq).sqrt().mean(),
        "average_first": (sc.mean() * pq.mean()).sqrt(),
        "average_first_following": (following.mean() * pq.mean()).sqrt(),
    }[reduction]
    return torch.stack([following.mean(), faithful.nanmean(), pq.mean(), overall])


@dataclass(eq=False, repr=False)
class EditScore(ChatJudge):
    """Scores an edited image against its source (the first reference) and the instruction.

    All dimensions are from 0 to 10. `sampling.passes` answers are drawn at temperature 0.7 by
    default. `template` asks about source and edit, `pq_template` about the edit only.
    """

    reduction: Reduction = "average_last"
    pq_template: str = "edit_score_pq"
    sampling: Sampling = field(default=Sampling(temperature=0.7), kw_only=True)
    usual, slots = "edit_score_sc", ("prompt", "references", "media")
    conversations = 2

    @override
    def read_wording(self) -> Template:
        self.pq = read_template(self.pq_template, ("media",))
        return super().read_wording()

    @override
    def declare(self) -> RewardSpec:
        return RewardSpec(
            name="edit_score",
            dims=DIMS,
            modality="image",
            scale=(0.0, 10.0),
            licence="Apache-2.0",
            needs=("prompt", "references"),
            normalisation="0 to 25, divided by 2.5",
        )

    def ask(self, sample: MediaBatch) -> Sequence[Messages]:
        """Return one conversation about source and edit, and one about the edit only."""
        edited = encode_frames(sample)
        return [
            self.wording.render(
                prompt=sample.prompts[0], references=encode_source(sample), media=edited
            ),
            self.pq.render(media=edited),
        ]

    def read(self, answers: Sequence[ChatAnswer]) -> Sequence[float]:
        """Return the four values that `reduce_passes` takes."""
        return parse_answers(answers[0].text, answers[1].text)

    @override
    def combine(self, passes: Float[Tensor, "k 4"]) -> Float[Tensor, "4"]:
        return reduce_passes(passes, self.reduction)
