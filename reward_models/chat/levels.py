"""Scores quality as the expected level among words from excellent to bad.

Q-Align, arXiv:2312.17090: values from 1 to 0. DeQA-Score, arXiv:2501.11561: from 5 to 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from flowalign.types import FiniteFloat, MediaBatch, PositiveInt, RewardSpec
from reward_models.backbones.pixels import pad_to_square
from reward_models.chat.chat_client import ChatAnswer, Messages, Server
from reward_models.chat.judge import ChatJudge, JudgeEnsemble, Sampling
from reward_models.chat.parsers import word_probabilities
from reward_models.chat.template import describe, encode_frames, read_template

LEVELS = {"excellent": 1.0, "good": 0.75, "fair": 0.5, "poor": 0.25, "bad": 0.0}
DEQA_LEVELS = {"excellent": 5.0, "good": 4.0, "fair": 3.0, "poor": 2.0, "bad": 1.0}
QUESTION = "How would you rate the quality of this image?"
BEGINNING = "The quality of the image is"
_SAMPLING = Sampling(max_tokens=1)


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
            modality="any",
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
    falls while the reward rises, the policy trades image quality for reward. With `drift.Drift` it
    measures the quality that a video loses over time. DeQA's own weights are code for transformers
    4 and need a separate server. Any other served model can answer the same question, with
    different scores.
    """
    return Levels(server, DEQA_LEVELS, sampling=sampling, square=True)
