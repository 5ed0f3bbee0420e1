"""Implements a reward from a chat model that sees one sample at a time."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.types import JudgeCalls, Loadable, MediaBatch, RewardModel, RewardOutput, RewardSpec
from reward_models.backbones.reward_bases import Unscorable
from reward_models.chat.chat_client import ChatAnswer, Messages
from reward_models.chat.judge_ensemble import JudgeEnsemble, Verdict
from reward_models.chat.parsers import Unparsable
from reward_models.chat.template import find_templates, warn_of_wording

Combine = Callable[[Tensor], Tensor]
"""Maps the values read in k passes [k, m] to one score per dimension [R]."""


def average_passes(passes: Float[Tensor, "k R"]) -> Float[Tensor, "R"]:
    """Average every dimension over the passes that have a score for it."""
    return passes.nanmean(0)


class ChatJudge(RewardModel, Loadable):
    """Reward from a chat model; a subclass defines the conversations (`ask`) and reads the answers.

    The score is `combine` of all readable passes, and the uncertainty their standard deviation. A
    sample without any readable pass is NaN with the reason. The raw texts are in `extras`.
    """

    conversations: ClassVar[int] = 1
    """Number of conversations that `ask` returns for a sample."""

    def __init__(
        self, spec: RewardSpec, ensemble: JudgeEnsemble, combine: Combine = average_passes
    ):
        self.spec, self.ensemble, self.combine = spec, ensemble, combine

    @abstractmethod
    def ask(self, sample: MediaBatch) -> Sequence[Messages]:
        """Return the conversations about a batch of one; all of them are sent in every pass.

        Raises:
            Unscorable: The sample cannot be shown.
        """

    @abstractmethod
    def read(self, answers: Sequence[ChatAnswer]) -> Sequence[float]:
        """Return the values for `combine`, given one answer per conversation.

        A value is NaN if it does not apply.

        Raises:
            Unparsable: The answer cannot be read. The judge is asked again.
        """

    @final
    def load(self) -> None:
        """Check that the server is running and offers the model."""
        self.ensemble.client.load()

    @final
    def close(self) -> None:
        """Close the connections."""
        self.ensemble.client.close()

    @property
    @final
    @override
    def caveat(self) -> str:
        return warn_of_wording(type(self).__name__, find_templates(self))

    @final
    @override
    def judge_calls(self, group_sizes: Sequence[int]) -> JudgeCalls:
        return self.ensemble.calls(sum(group_sizes) * self.conversations)

    @final
    def score(self, batch: MediaBatch) -> RewardOutput:
        """Ask about all samples at the same time."""
        failed = self.spec.screen(batch)
        self.load()
        questions: dict[int, Sequence[Messages]] = {}
        for i in (i for i in range(len(batch)) if i not in failed):
            try:
                questions[i] = self.ask(batch.take([i]))
            except Unscorable as reason:
                failed[i] = str(reason)
        verdicts = self.ensemble.collect(list(questions.values()), self._read)
        values = torch.full((len(batch), len(self.spec.dims)), torch.nan)
        spread = values.clone()
        extras: list[Mapping[str, Any]] = [{} for _ in range(len(batch))]
        for i, verdict in zip(questions, verdicts, strict=True):
            extras[i] = {"texts": list(verdict.texts), "missing": list(verdict.missing)}
            if len(verdict.values) == 0:
                failed[i] = verdict.missing[0]
                continue
            values[i] = self.combine(verdict.values).float()
            spread[i] = self._spread(verdict)
        uncertainty = spread if self.ensemble.sampling.passes > 1 else None
        output = RewardOutput.build(self.spec, values, failed, uncertainty, extras)
        return replace(output, reasons={**output.reasons, **self._partial(output, failed)})

    def _read(self, answers: Sequence[ChatAnswer]) -> Sequence[float]:
        """Return the values; raise Unparsable if a score that results is outside the scale."""
        values = self.read(answers)
        scores = self.combine(torch.tensor([values], dtype=torch.float64))
        low, high = self.spec.scale
        outside = [x for x in scores.tolist() if x == x and not low <= x <= high]
        if outside:
            raise Unparsable(f"its score {outside[0]:g} is outside [{low:g}, {high:g}]")
        return values

    def _spread(self, verdict: Verdict) -> Float[Tensor, "R"]:
        scores = torch.stack([self.combine(row[None]) for row in verdict.values]).float()
        return scores.std(0) if len(scores) > 1 else torch.full_like(scores[0], torch.nan)

    def _partial(self, output: RewardOutput, failed: Mapping[int, str]) -> dict[int, str]:
        """Return reasons for samples that lack some of their dimensions."""
        return {
            i: f"the judge gave no {', '.join(self._without(output, i))}"
            for i in output.reasons
            if i not in failed
        }

    def _without(self, output: RewardOutput, i: int) -> list[str]:
        scored = zip(self.spec.dims, output.valid[i].tolist(), strict=True)
        return [dim for dim, ok in scored if not ok]
