"""Builds VisionReward: checklists for images and videos with their released questions and weights.

The judges of the paper (CogVLM2 fine-tuned on these questions, remote code for an old transformers)
are not supported; any judge can answer the questions. The paper's judges see the frame of a video
nearest to each full second, 24 at most, as does a `QwenYesNo` with `fps: seconds`. Two features of
the release are kept: harmlessness counts only if there is a human body, and `mean` divides by the
number of questions.

Source: questions, weights and conditions from the files in github.com/THUDM/VisionReward.
"""

from typing import Literal

from flowalign.types import RewardModel
from reward_models.backbones.yes_no_judges import YesNoJudge
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
