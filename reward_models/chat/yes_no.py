"""Uses the probability of yes of a served chat model: as a reward, and as the judge of a checklist.

The reward is VQAScore by a chat model, for any yes/no question.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.types import MAY_PASS, MediaBatch, PositiveInt, RewardSpec
from reward_models.backbones.reward_bases import Unscorable
from reward_models.backbones.yes_no_judges import YesNoJudge
from reward_models.chat.chat_client import ChatAnswer, Messages, Server
from reward_models.chat.judge import ChatJudge, JudgeEnsemble, Sampling
from reward_models.chat.parsers import yes_probabilities
from reward_models.chat.template import describe, encode_frames, read_template

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
        return yes_probabilities(answers)


class ServedYesNo(YesNoJudge):
    """Answers P(yes) / (P(yes) + P(no)) of the first token, one conversation per question.

    All questions about all samples are sent concurrently; the server's prefix cache shares the
    computation of a sample between its questions. Of a video at most `frames` frames are shown.
    """

    def __init__(
        self,
        server: Server,
        frames: PositiveInt = 8,
        template: str = "yes_no",
        sampling: Sampling = _SAMPLING,
    ):
        self.frames, self.template = frames, read_template(template, ("question", "media"))
        self.ensemble = JudgeEnsemble(server, sampling, first_token=True)
        self.version = self.ensemble.version(frames=frames, **describe(self.template))

    def load(self) -> None:
        """Check that the server is running and offers the model."""
        self.ensemble.client.load()

    def ask(
        self, batch: MediaBatch, questions: Sequence[Sequence[str]]
    ) -> Float[Tensor, "n questions"]:
        """Return P(yes) of every question; NaN if a sample or an answer cannot be used."""
        self.load()
        width = len(questions[0]) if questions else 0
        answers = torch.full((len(batch), width), torch.nan)
        places, asked = [], []
        for i, some in enumerate(questions):
            try:
                pictures = encode_frames(batch.take([i]), self.frames)
            except Unscorable:
                continue  # its answers stay NaN
            for j, question in enumerate(some):
                places.append((i, j))
                asked.append([self.template.render(question=question, media=pictures)])
        verdicts = self.ensemble.collect(asked, yes_probabilities)
        missing = (why for verdict in verdicts for why in verdict.missing)
        self.silence = next((why for why in missing if MAY_PASS in why), YesNoJudge.silence)
        for place, verdict in zip(places, verdicts, strict=True):
            if len(verdict.values):
                answers[place] = float(verdict.values.mean())
        return answers
