"""Builds VisionReward: checklists for images and videos with their released questions and weights.

The judges of the paper (CogVLM2 fine-tuned on such questions, remote code for an old transformers)
are not loaded here; any judge answers the lists. Of a video they saw the frame nearest to each full
second, 24 at most, as a `QwenYesNo` with `fps: seconds` does. Two features of the release are
kept: harmlessness counts only where there is a human body, and `mean` divides by the number of
questions.

Questions, weights and conditions are those of the files in github.com/THUDM/VisionReward.
"""

from typing import Literal

from flowalign.types import RewardModel
from reward_models.backbones.yes_no import YesNoJudge
from reward_models.questions.checklist import Checklist
from reward_models.questions.question_set import Answers


def vision_reward_image(
    judge: YesNoJudge,
    alignment: RewardModel | Literal["judge", "omit"],
    answers: Answers = "hard",
    items: bool = False,
) -> Checklist:
    """Build 27 questions about an image, 10 of them conditional, and an alignment reward.

    The alignment reward of the release is VQAScore.
    """
    return Checklist(judge, "vision_reward_image", answers, alignment, items)


def vision_reward_video(
    judge: YesNoJudge, answers: Answers = "hard", items: bool = False
) -> Checklist:
    """Build 29 questions about a video, three of them about its prompt."""
    return Checklist(judge, "vision_reward_video", answers, items=items)
