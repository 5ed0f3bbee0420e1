"""Implements SpectraReward, arXiv:2607.11886: the likelihood of the prompt, given the image.

`R = 1 / (T - 1) sum_t log p(x_{t+1} | x_<=t, image)` over the T tokens x of the prompt, by any
frozen vision-language model. The chat template and the instruction of the paper could not be read;
`INSTRUCTION` is our choice and part of the fingerprint.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.types import MediaBatch, RewardSpec
from reward_models.backbones.prefix import pack_texts
from reward_models.backbones.reward_bases import BatchScores, Composed, ScreenedReward
from reward_models.backbones.yes_no_judges import QwenYesNo

INSTRUCTION = "Describe this image."
"""User turn beside the image; the prompt is scored as the answer."""
_UNREADABLE = "its prompt contains a special token or is a single token"


class SpectraReward(Composed, ScreenedReward):
    """Scores the mean log-probability of the prompt's tokens in nats, at most 0.

    Values depend on the words of the prompt, so compare them within a prompt only. An image that
    shows the prompt as text can score high: watch such a run with an OCR reader.
    """

    def __init__(self, judge: QwenYesNo, instruction: str = INSTRUCTION):
        self.judge, self.instruction = judge, instruction
        self.spec = RewardSpec(
            name="spectra_reward",
            dims=("prompt_likelihood",),
            scale=(-math.inf, 0.0),
            licence="that of the judge",
            differentiable=True,
            needs=("prompt",),
            normalisation="mean log-probability per token",
            version=f"{judge.version} {instruction}",
        )

    def rate(self, batch: MediaBatch) -> BatchScores:
        """Read the prompt of each sample as an answer, in one pass; its end does not count."""
        tokenizer, asked = self.judge.processor.tokenizer, self.judge.tail(self.instruction)
        answers = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in batch.prompts]

        def mean(logits: Float[Tensor, "n T V"], rows: Sequence[int]) -> Float[Tensor, "n 1"]:
            scores = []
            for row, i in zip(logits, rows, strict=True):
                successors = torch.tensor(answers[i][1:], device=row.device)[:, None]
                log_p = row[len(asked) :][: len(successors)].log_softmax(-1)
                scores.append(log_p.gather(1, successors).mean())
            return torch.stack(scores)[:, None]

        tails = [[asked + answer] for answer in answers]
        scores = self.judge.read_logits(batch, tails, mean, pack_texts)
        scores = scores.masked_fill(self.judge.find_special([[p] for p in batch.prompts]), math.nan)
        silent = scores.isnan().flatten().nonzero().flatten().tolist()
        return BatchScores(scores, failed=dict.fromkeys(silent, _UNREADABLE))
