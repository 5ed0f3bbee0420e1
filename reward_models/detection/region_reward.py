"""Implements a global and a local reward: for the layout of an image, and for each region.

Source: SRUM, arXiv:2510.12784 and its code, WayneJin0918/SRUM. In SRUM the trained model judges
itself with written scores from -1 to 1, and SAM proposes the regions. Here the score is 2 P(yes) -
1 of a yes/no judge, and a detector proposes the regions. The questions are our choice. SRUM weights
the pixels of its matching loss by the map; `recipe.data.weight_map` of scored groups does the same.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.resizing import paint_boxes
from flowalign.types import JudgeCalls, MediaBatch, PositiveInt, RewardSpec, UnitInterval
from reward_models.backbones.detection import Detection, Detector
from reward_models.backbones.reward_bases import (
    Composed,
    RuleReward,
    Unscorable,
    Verdict,
    YesNoJudge,
)
from reward_models.questions.vqa_score import fill_questions

LAYOUT = 'Are the things in this figure arranged as "[[prompt]]" says? Please answer yes or no.'
REGION = (
    "Look only at the part of this figure from {left}% to {right}% of its width and from {top}% to "
    '{bottom}% of its height, both from the top left. Does what is there belong to "[[prompt]]", '
    "and is it free of flaws? Please answer yes or no."
)


class RegionReward(Composed, RuleReward):
    """Scores the layout as `global` and the mean of the regions as `local`, both in [-1, 1].

    `detector` proposes the regions. The `max_regions` with the highest detection scores are judged.
    Without any region, `local` is neutral, 0. The extras hold every region with its score, and the
    map holds the score of each pixel.
    """

    def __init__(
        self,
        judge: YesNoJudge,
        detector: Detector,
        threshold: UnitInterval = 0.3,
        max_regions: PositiveInt = 8,
    ):
        self.vlm, self.detector = judge, detector
        self.threshold, self.max_regions = threshold, max_regions
        self.spec = RewardSpec(
            name="region_reward",
            dims=("global", "local"),
            modality="image",
            scale=(-1.0, 1.0),
            licence="that of the judge",
            needs=("prompt",),
            normalisation="2 P(yes) - 1",
            maps=True,
            version=f"{judge.version} {detector.version} {threshold} {max_regions} {LAYOUT} "
            f"{REGION}",
        )

    @override
    def judge_calls(self, group_sizes: Sequence[int]) -> JudgeCalls:
        return self.vlm.calls(sum(group_sizes) * (1 + self.max_regions))

    def judge(self, sample: MediaBatch) -> Verdict:
        """Ask about the layout and about every region."""
        height, width = sample.media.shape[-2:]
        found = [d for d in self.detector.detect(sample.media[0, 0]) if d.score > self.threshold]
        regions = sorted(found, key=lambda d: -d.score)[: self.max_regions]
        questions = [LAYOUT, *(_fill_question(region, height, width) for region in regions)]
        yes = self.vlm.ask(sample, [fill_questions(questions, sample.prompts[0])])[0]
        if yes.isnan().any():
            raise Unscorable(self.vlm.silence)
        layout, *each = (2 * yes - 1).tolist()
        rows = [
            {"label": region.label, "box": list(region.box), "score": score}
            for region, score in zip(regions, each, strict=True)
        ]
        local = sum(each) / len(each) if each else 0.0
        found = {"global": layout, "regions": rows}
        return (layout, local), found, paint_rewards(found, height, width)


def paint_rewards(
    extras: Mapping[str, Any], height: int, width: int
) -> Float[Tensor, "height width"]:
    """Return pixel weights in [0, 1]: (1 + region) / 2 times (1 + global) / 2.

    Pixels outside of all regions get a neutral first factor, 1 / 2. Where regions overlap, the best
    one counts. In SRUM's code no region counts less than neutral, which hides all bad regions; here
    they do.
    """
    boxes = torch.tensor([region["box"] for region in extras["regions"]]).reshape(-1, 4)
    worth = (1 + torch.tensor([region["score"] for region in extras["regions"]])) / 2
    return paint_boxes(boxes, worth, height, width, elsewhere=0.5) * (1 + extras["global"]) / 2


def _fill_question(region: Detection, height: int, width: int) -> str:
    """Return the question about a region, with its edges in percent."""
    left, top, right, bottom = region.box
    shares = {"left": left / width, "right": right / width}
    shares |= {"top": top / height, "bottom": bottom / height}
    return REGION.format(**{name: round(100 * share) for name, share in shares.items()})
