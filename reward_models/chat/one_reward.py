"""Implements a judge of two results by task and criterion, after OneReward.

OneReward is one model that receives the task and the criterion and decides whether the first of two
results is better. Its weights are not released, so the question is a reconstruction for any chat
model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from flowalign.types import Column, MediaBatch, RewardSpec
from reward_models.backbones.reward_bases import metadata_of
from reward_models.chat.chat_client import ChatAnswer, Messages
from reward_models.chat.judge import Sampling
from reward_models.chat.pair_judges import PairJudge
from reward_models.chat.parsers import yes_probabilities
from reward_models.chat.template import encode_frames, encode_references

TASKS = {
    "text_to_image": "text to image",
    "image_edit": "editing a picture as an instruction says",
    "image_fill": "filling the masked part of a picture",
    "image_extend": "extending a picture beyond its borders",
    "object_removal": "removing what is masked from a picture",
    "text_rendering": "writing a text into the masked part of a picture",
}
"""Task names in the metadata, and their wording in the question."""
CRITERIA = {
    "text_alignment": "how well it does what the request asks",
    "consistency": "how well it fits what it must leave unchanged",
    "structure": "whether shapes, anatomy and perspective are right",
    "aesthetics": "how beautiful it is",
}


@dataclass(eq=False, repr=False)
class OneReward(PairJudge):
    """Scores the probability that the first result is better, per criterion, from the first token.

    The task of a sample is the `task` of its metadata, one of the names in `tasks`, so one run can
    mix tasks. Set `task` to use one description for all samples instead. `criteria` maps dimension
    names to descriptions of the criterion. If a sample has references and a mask, they are shown
    before the results.
    """

    task: str | None = None
    criteria: Mapping[str, str] = field(default_factory=CRITERIA.copy)
    sampling: Sampling = field(default=Sampling(max_tokens=1), kw_only=True)
    tasks: Mapping[str, str] = field(default_factory=TASKS.copy)
    reads_first_token, usual = True, "one_reward"
    slots = ("prompt", "task", "criterion", "first", "second")
    optional_slots = ("references",)

    @override
    def declare(self) -> RewardSpec:
        if not self.criteria:
            raise ValueError("criteria is empty; name at least one, such as aesthetics")
        if self.task is None and not self.tasks:
            raise ValueError("tasks is empty; name at least one, or set task")
        self.conversations = len(self.criteria)
        return RewardSpec(
            name="one_reward",
            dims=tuple(self.criteria),
            modality="image",
            scale=(0.0, 1.0),
            licence="that of the served model",
            needs=("prompt",),
            columns=() if self.task else (Column("task", tuple(self.tasks)),),
        )

    def ask(self, first: MediaBatch, second: MediaBatch) -> Sequence[Messages]:
        """Return one conversation per criterion."""
        return [
            self.wording.render(
                prompt=first.prompts[0],
                task=self.task or self.tasks[metadata_of(first)["task"]],
                criterion=criterion,
                references=encode_references(first),
                first=encode_frames(first),
                second=encode_frames(second),
            )
            for criterion in self.criteria.values()
        ]

    def read(self, answers: Sequence[ChatAnswer]) -> Sequence[float]:
        """Return P(yes) / (P(yes) + P(no)) of every answer."""
        return yes_probabilities(answers)
