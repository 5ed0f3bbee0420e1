"""Scores with the first token of a served chat model: the odds of yes, or of words for quality.

`YesNo` is VQAScore by a chat model, for any yes/no question. `Levels` is the expected level among
words from excellent to bad. Q-Align, arXiv:2312.17090: values from 1 to 0. DeQA-Score,
arXiv:2501.11561: from 5 to 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.types import MAY_PASS, FiniteFloat, MediaBatch, PositiveInt, RewardSpec
from reward_models.backbones.pixels import pad_to_square
from reward_models.backbones.reward_bases import Unscorable, YesNoJudge
from reward_models.chat.chat_client import ChatAnswer, Messages, Server
from reward_models.chat.judge import ChatJudge, Judge, Sampling
from reward_models.chat.parsers import word_probabilities, yes_probabilities
from reward_models.chat.template import encode_frames

QUESTIONS = {"alignment": 'Does this show "{prompt}"?'}
LEVELS = {"excellent": 1.0, "good": 0.75, "fair": 0.5, "poor": 0.25, "bad": 0.0}
DEQA_LEVELS = {"excellent": 5.0, "good": 4.0, "fair": 3.0, "poor": 2.0, "bad": 1.0}
QUESTION = "How would you rate the quality of this image?"
BEGINNING = "The quality of the image is"
_SAMPLING = Sampling(max_tokens=1)


@dataclass(eq=False, repr=False)
class YesNo(ChatJudge):
    """Scores P(yes) / (P(yes) + P(no)) of the first token, in one dimension per question.

    `Yes`, ` yes` and `YES` count as the same answer. A question may contain {prompt}. Of a video at
    most `frames` frames are shown. Models that think before they answer are not supported.
    """

    questions: Mapping[str, str] = field(default_factory=QUESTIONS.copy)
    frames: PositiveInt = 8
    sampling: Sampling = field(default=_SAMPLING, kw_only=True)
    reads_first_token, usual, slots = True, "yes_no", ("question", "media")

    @override
    def declare(self) -> RewardSpec:
        if not self.questions:
            raise ValueError('questions is empty; give at least one, such as {cat: "Is it a cat?"}')
        self.conversations = len(self.questions)
        about_prompt = any("{prompt}" in question for question in self.questions.values())
        return RewardSpec(
            name="yes_no",
            dims=tuple(self.questions),
            scale=(0.0, 1.0),
            licence="that of the served model",
            needs=("prompt",) if about_prompt else (),
        )

    def ask(self, sample: MediaBatch) -> Sequence[Messages]:
        """Return one conversation per question."""
        pictures = encode_frames(sample, self.frames)
        return [
            self.wording.render(
                question=question.replace("{prompt}", sample.prompts[0]), media=pictures
            )
            for question in self.questions.values()
        ]

    def read(self, answers: Sequence[ChatAnswer]) -> Sequence[float]:
        """Return the probability of yes for every question."""
        return yes_probabilities(answers)


@dataclass(eq=False, repr=False)
class ServedYesNo(Judge, YesNoJudge):
    """Answers P(yes) / (P(yes) + P(no)) of the first token, one conversation per question.

    All questions about all samples are sent concurrently; the server's prefix cache shares the
    computation of a sample between its questions. Of a video at most `frames` frames are shown.
    """

    frames: PositiveInt = 8
    sampling: Sampling = field(default=_SAMPLING, kw_only=True)
    reads_first_token, usual, slots = True, "yes_no", ("question", "media")

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
                asked.append([self.wording.render(question=question, media=pictures)])
        verdicts = self.collect(asked, yes_probabilities)
        missing = (why for verdict in verdicts for why in verdict.missing)
        self.silence = next((why for why in missing if MAY_PASS in why), YesNoJudge.silence)
        for place, verdict in zip(places, verdicts, strict=True):
            if len(verdict.values):
                answers[place] = float(verdict.values.mean())
        return answers


@dataclass(eq=False, repr=False)
class Levels(ChatJudge):
    """Scores the sum of value * probability over the level words, renormalised to these words.

    The server must continue `beginning` (vLLM and sglang can); the next token must be a level word.
    `square` pads images to squares with CLIP's mean colour, as in the training of both models.
    """

    levels: Mapping[str, FiniteFloat] = field(default_factory=LEVELS.copy)
    question: str = QUESTION
    beginning: str = BEGINNING
    frames: PositiveInt = 8
    sampling: Sampling = field(default=_SAMPLING, kw_only=True)
    square: bool = False
    reads_first_token, usual, slots = True, "levels", ("question", "media")

    @override
    def more_parameters(self) -> Mapping[str, Any]:
        continued = {"continue_final_message": True, "add_generation_prompt": False}
        return continued if self.beginning else {}

    @override
    def declare(self) -> RewardSpec:
        values = self.levels.values()
        if len(set(values)) < 2 or any(word != word.lower() for word in self.levels):
            wanted = "must be lower-case words with different values"
            raise ValueError(f"levels {dict(self.levels)} {wanted}")
        return RewardSpec(
            name="levels",
            dims=("quality",),
            scale=(min(values), max(values)),
            licence="that of the served model",
        )

    def ask(self, sample: MediaBatch) -> Sequence[Messages]:
        """Return one conversation that ends with the beginning of the answer."""
        if self.square:
            sample = replace(sample, media=pad_to_square(sample.media[0].detach())[None])
        pictures = encode_frames(sample, self.frames)
        begun = [{"role": "assistant", "content": self.beginning}] if self.beginning else []
        return [[*self.wording.render(question=self.question, media=pictures), *begun]]

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
