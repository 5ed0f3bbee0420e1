"""Turns any yes/no question into a reward: the probability of yes (VQAScore by a chat model)."""

from collections.abc import Mapping, Sequence

from flowalign.types import MediaBatch, PositiveInt, RewardSpec
from reward_models.chat.chat_client import ChatAnswer, Messages, Server
from reward_models.chat.images import encode_frames
from reward_models.chat.judge import ChatJudge
from reward_models.chat.judge_ensemble import JudgeEnsemble, Sampling, check_positive
from reward_models.chat.parsers import word_probabilities
from reward_models.chat.template import describe, read_template

QUESTIONS = {"alignment": 'Does this show "{prompt}"?'}
_SAMPLING = Sampling(max_tokens=1)


class YesNo(ChatJudge):
    """Scores P(yes) / (P(yes) + P(no)) of the first token, in one dimension per question.

    `Yes`, ` yes` and `YES` count as the same answer. A question may contain {prompt}. Of a video at
    most `frames` frames are shown. Models that think before they answer are not supported.
    """

    def __init__(
        self,
        server: Server,
        questions: Mapping[str, str] = QUESTIONS,
        frames: PositiveInt = 8,
        template: str = "yes_no",
        sampling: Sampling = _SAMPLING,
    ):
        if not questions:
            raise ValueError('questions is empty; give at least one, such as {cat: "Is it a cat?"}')
        check_positive(frames=frames)
        self.questions, self.frames = dict(questions), frames
        self.template = read_template(template, ("question", "media"))
        ensemble = JudgeEnsemble(server, sampling, first_token=True)
        version = ensemble.version(
            questions=self.questions, frames=frames, **describe(self.template)
        )
        about_prompt = any("{prompt}" in question for question in self.questions.values())
        spec = RewardSpec(
            name="yes_no",
            dims=tuple(self.questions),
            modality="any",
            scale=(0.0, 1.0),
            licence="that of the served model",
            needs=("prompt",) if about_prompt else (),
            version=version,
        )
        super().__init__(spec, ensemble)

    def ask(self, sample: MediaBatch) -> Sequence[Messages]:
        """Return one conversation per question."""
        pictures = encode_frames(sample, self.frames)
        return [
            self.template.render(
                question=question.replace("{prompt}", sample.prompts[0]), media=pictures
            )
            for question in self.questions.values()
        ]

    def read(self, answers: Sequence[ChatAnswer]) -> Sequence[float]:
        """Return the probability of yes for every question."""
        return [word_probabilities(answer, 0, ("yes", "no"))[0] for answer in answers]
