"""Scores quality as the expected level among words from excellent to bad.

Q-Align, arXiv:2312.17090: values from 1 to 0. DeQA-Score, arXiv:2501.11561: from 5 to 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from flowalign.types import FiniteFloat, MediaBatch, PositiveInt, RewardSpec
from reward_models.chat.client import ChatAnswer, Messages, Server
from reward_models.chat.images import encode_frames, pad_to_square
from reward_models.chat.judge import ChatJudge
from reward_models.chat.judge_ensemble import JudgeEnsemble, Sampling, check_positive
from reward_models.chat.parsers import word_probabilities
from reward_models.chat.template import describe, read_template

LEVELS = {"excellent": 1.0, "good": 0.75, "fair": 0.5, "poor": 0.25, "bad": 0.0}
DEQA_LEVELS = {"excellent": 5.0, "good": 4.0, "fair": 3.0, "poor": 2.0, "bad": 1.0}
QUESTION = "How would you rate the quality of this image?"
BEGINNING = "The quality of the image is"
_SAMPLING = Sampling(max_tokens=1)


class Levels(ChatJudge):
    """Scores the sum of value * probability over level words, renormalised to those words.

    The server is asked to continue `beginning` (vLLM and sglang do); its next token must be a level
    word. `square` pads images to squares with CLIP's mean colour, as both models were trained.
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
            raise ValueError(f"levels {dict(levels)} must be small words with different values")
        check_positive(frames=frames)
        self.levels, self.question, self.beginning = dict(levels), question, beginning
        self.square = square
        self.frames, self.template = frames, read_template(template, ("question", "media"))
        continued = {"continue_final_message": True, "add_generation_prompt": False}
        likeliest = {"logprobs": True, "top_logprobs": 20}
        ensemble = JudgeEnsemble(
            server, sampling, {**likeliest, **(continued if beginning else {})}
        )
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
        """Build one conversation whose answer has begun."""
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
    """Build DeQA-Score's question and scale, from 1 to 5: quality, whatever the prompt.

    It is watched beside what a run optimises, with weight 0: where it falls while the reward rises,
    pictures pay for the reward. `drift.Drift` of it says how much quality a video loses on its way.
    DeQA's own weights are code for transformers 4 and need a server of their own; any served model
    answers the same question otherwise.
    """
    return Levels(server, DEQA_LEVELS, sampling=sampling, square=True)
