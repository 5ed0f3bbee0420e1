"""Scores with the first token of a served chat model: the odds of yes, or of words for quality.

`YesNo` is VQAScore by a chat model, for any yes/no question. `Levels` is the expected level among
words from excellent to bad. Q-Align, arXiv:2312.17090: values from 1 to 0. DeQA-Score,
arXiv:2501.11561: from 5 to 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.types import MAY_PASS, FiniteFloat, JudgeCalls, MediaBatch, PositiveInt, RewardSpec
from reward_models.backbones.pixels import pad_to_square
from reward_models.backbones.reward_bases import Unscorable, YesNoJudge
from reward_models.chat.chat_client import ChatAnswer, Messages, Server
from reward_models.chat.judge import ChatJudge, JudgeEnsemble, Sampling
from reward_models.chat.parsers import word_probabilities, yes_probabilities
from reward_models.chat.template import (
    describe,
    encode_frames,
    find_templates,
    read_template,
    warn_of_wording,
)

QUESTIONS = {"alignment": 'Does this show "{prompt}"?'}
LEVELS = {"excellent": 1.0, "good": 0.75, "fair": 0.5, "poor": 0.25, "bad": 0.0}
DEQA_LEVELS = {"excellent": 5.0, "good": 4.0, "fair": 3.0, "poor": 2.0, "bad": 1.0}
QUESTION = "How would you rate the quality of this image?"
BEGINNING = "The quality of the image is"
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
        self.caveat = warn_of_wording(type(self).__name__, find_templates(self))

    @override
    def calls(self, questions: int) -> JudgeCalls:
        return self.ensemble.calls(questions)

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


class Levels(ChatJudge):
    """Scores the sum of value * probability over the level words, renormalised to these words.

    The server must continue `beginning` (vLLM and sglang can); the next token must be a level word.
    `square` pads images to squares with CLIP's mean colour, as in the training of both models.
    """

    def __init__(
        self,
        server: Server,
        levels: Mapping[str, FiniteFloat] = LEVELS,
        question: str = QUESTION,
        beginning: str = BEGINNING,
        frames: PositiveInt = 8,
        template: str = "levels",
        sampling: Sampling = _SAMPLING,
        square: bool = False,
    ):
        if len(set(levels.values())) < 2 or any(word != word.lower() for word in levels):
            raise ValueError(
                f"levels {dict(levels)} must be lower-case words with different values"
            )
        self.levels, self.question, self.beginning = dict(levels), question, beginning
        self.square = square
        self.frames, self.template = frames, read_template(template, ("question", "media"))
        continued = {"continue_final_message": True, "add_generation_prompt": False}
        ensemble = JudgeEnsemble(server, sampling, continued if beginning else {}, first_token=True)
        asked = {"question": question, "beginning": beginning, "frames": frames}
        asked |= {"square": square} if square else {}
        spec = RewardSpec(
            name="levels",
            dims=("quality",),
            scale=(min(levels.values()), max(levels.values())),
            licence="that of the served model",
            version=ensemble.version(levels=self.levels, **asked, **describe(self.template)),
        )
        super().__init__(spec, ensemble)

    def ask(self, sample: MediaBatch) -> Sequence[Messages]:
        """Return one conversation that ends with the beginning of the answer."""
        if self.square:
            sample = replace(sample, media=pad_to_square(sample.media[0].detach())[None])
        pictures = encode_frames(sample, self.frames)
        begun = [{"role": "assistant", "content": self.beginning}] if self.beginning else []
        return [[*self.template.render(question=self.question, media=pictures), *begun]]

    def read(self, answers: Sequence[ChatAnswer]) -> Sequence[float]:
        """Return the expected value."""
        weights = word_probabilities(answers[0], 0, tuple(self.levels))
        return [sum(v * w for v, w in zip(self.levels.values(), weights, strict=True))]


def deqa(server: Server, sampling: Sampling = _SAMPLING) -> Levels:
    """Build DeQA-Score's question about image quality, on a scale from 1 to 5.

    The score does not depend on the prompt. Use it with weight 0 to detect reward hacking: if it
    falls while the reward rises, the policy trades image quality for reward. With `Drift` it
    measures the quality that a video loses over time. DeQA's own weights are code for transformers
    4 and need a separate server. Any other served model can answer the same question, with
    different scores.
    """
    return Levels(server, DEQA_LEVELS, sampling=sampling, square=True)
