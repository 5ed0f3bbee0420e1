"""Asks chat models about samples: judges of one sample, and ensembles of passes that they share."""

import asyncio
import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, fields, replace
from typing import Any, ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.types import (
    MAY_PASS,
    JudgeCalls,
    Loadable,
    MediaBatch,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    RewardSpec,
    Seed,
    require_ranges,
)
from reward_models.backbones.reward_bases import BatchScores, ScreenedReward, collect
from reward_models.chat.chat_client import ChatAnswer, ChatClient, Messages, Server
from reward_models.chat.guards import ChatError, ServerDown
from reward_models.chat.parsers import Unparsable
from reward_models.chat.template import Template, read_template

_OF_ALL = ("server", "sampling", "template", "pq_template")
"""Settings that enter the version by their content."""
Read = Callable[[Sequence[ChatAnswer]], Sequence[float]]


@dataclass(frozen=True)
class Sampling:
    """Settings of the sampling of answers."""

    passes: PositiveInt = 1
    """Number of independent answers per sample; the score is their mean."""
    temperature: NonNegativeFloat = 0.0
    max_tokens: PositiveInt = 1024
    seed: Seed = 42
    """Seed of the first pass; the following passes count up from it."""
    retries: NonNegativeInt = 2
    """Maximum number of new answers, each with a new seed, after an answer that cannot be parsed.
    """

    def __post_init__(self) -> None:
        require_ranges(self, "sampling")


@dataclass(frozen=True)
class Verdict:
    """Values and texts for one sample or one comparison."""

    values: Float[Tensor, "k m"]
    """Values with one row per readable pass."""
    missing: Sequence[str]
    """Reasons of the passes that could not be read, those that may pass first."""
    texts: Sequence[str]
    """Texts of the judge's answers, in order."""


@dataclass(frozen=True)
class _Pass:
    values: Sequence[float] | None
    texts: Sequence[str]
    reason: str = ""


_USUAL = Sampling()


@dataclass(eq=False, repr=False)
class Judge(Loadable):
    """Chat model on a server that is asked the same questions in several independent passes.

    The fields are its settings; those of subclasses, and the wording, enter its version. A judge
    either reads text, and then an answer that was cut off counts as unreadable, or the
    probabilities of the first token, which are complete wherever the answer ends.
    """

    server: Server
    _: KW_ONLY
    template: str | None = None
    """Wording: a bundled name, a file, `hub:` or `package:`; null: that of the model."""
    sampling: Sampling = _USUAL
    reads_first_token: ClassVar[bool] = False
    usual: ClassVar[str] = ""
    """Name of the model's own template."""
    slots: ClassVar[tuple[str, ...]] = ("prompt", "media")
    """Slots that a template must have."""
    optional_slots: ClassVar[tuple[str, ...]] = ()
    conversations = 1
    """Number of conversations about a sample, or a pair."""

    def __post_init__(self) -> None:
        """Read the wording, and connect to nothing yet."""
        super().__post_init__()
        self.client, self.wording = ChatClient(self.server), self.read_wording()
        probabilities = {"logprobs": True, "top_logprobs": 20} if self.reads_first_token else {}
        self.parameters = {
            "temperature": self.sampling.temperature,
            "max_tokens": self.sampling.max_tokens,
            **probabilities,
            **self.more_parameters(),
        }
        names = {one.name for one in fields(self) if one.init} - {*_OF_ALL}
        own = {name: getattr(self, name) for name in names}
        texts = [[one.system, one.user] for one in self._templates()]
        decisive = self.server.model, asdict(self.sampling), self.parameters, own, texts
        hashed = hashlib.sha256(json.dumps(decisive, sort_keys=True, default=asdict).encode())
        self.version = hashed.hexdigest()[:16]

    def read_wording(self) -> Template:
        """Return the template of the question.

        Raises:
            ValueError: It cannot be read, or lacks a slot.
        """
        return read_template(self.template or self.usual, self.slots, self.optional_slots)

    def more_parameters(self) -> Mapping[str, Any]:
        """Return further parameters of a request. Default: none."""
        return {}

    @final
    def load(self) -> None:
        """Check that the server is running and offers the model."""
        self.client.load()

    @property
    @final
    @override
    def caveat(self) -> str:
        places = dict.fromkeys(one.official for one in self._templates() if one.official)
        if not places:
            return ""
        return (
            f"{type(self).__name__} asks in our wording, but the judge was trained with another, "
            "so its scores are not those of its paper. Set `template` to the official text: "
            f"{'; '.join(places)}"
        )

    def _templates(self) -> list[Template]:
        return [value for value in vars(self).values() if isinstance(value, Template)]

    def calls(self, questions: int) -> JudgeCalls:
        """Return what this number of conversations costs in all passes."""
        answers = questions * self.sampling.passes
        return JudgeCalls(answers, answers * self.sampling.max_tokens)

    def collect(self, questions: Sequence[Sequence[Messages]], read: Read) -> list[Verdict]:
        """Return one verdict per entry; the conversations of an entry are read together.

        All requests are sent concurrently, up to the server's `concurrency`.
        """
        return self.client.run(self._collect(questions, read))

    async def _collect(self, questions: Sequence[Sequence[Messages]], read: Read) -> list[Verdict]:
        return list(await asyncio.gather(*(self._verdict(asked, read) for asked in questions)))

    async def _verdict(self, asked: Sequence[Messages], read: Read) -> Verdict:
        number = range(self.sampling.passes)
        passes = await asyncio.gather(*(self._pass(asked, read, k) for k in number))
        rows = [p.values for p in passes if p.values is not None] or torch.empty(0, 0)
        missing = [p.reason for p in passes if p.values is None]
        return Verdict(
            torch.as_tensor(rows, dtype=torch.float64),
            sorted(missing, key=lambda reason: MAY_PASS not in reason),
            [text for p in passes for text in p.texts],
        )

    async def _pass(self, asked: Sequence[Messages], read: Read, number: int) -> _Pass:
        texts: Sequence[str] = ()
        reason = ""
        for retry in range(self.sampling.retries + 1):
            seed = self.sampling.seed + number + retry * self.sampling.passes
            parameters = {**self.parameters, "seed": seed}
            try:
                answers = await asyncio.gather(*(self.client.ask(m, parameters) for m in asked))
            except ChatError as error:
                passing = f" {MAY_PASS}" if isinstance(error, ServerDown) else ""
                return _Pass(None, texts, f"{error}{passing}")
            texts = [answer.text for answer in answers]
            try:
                return _Pass(self._check(answers, read), texts)
            except Unparsable as error:
                reason = str(error)
                for messages in asked:
                    self.client.forget(messages, parameters)
        return _Pass(None, texts, reason)

    def _check(self, answers: Sequence[ChatAnswer], read: Read) -> Sequence[float]:
        if not self.reads_first_token and any(answer.finish == "length" for answer in answers):
            raise Unparsable(f"cut off at {self.parameters['max_tokens']} tokens")
        return read(answers)


@dataclass(eq=False, repr=False)
class ChatJudge(Judge, ScreenedReward):
    """Reward from a chat model; a subclass defines the conversations (`ask`) and reads the answers.

    The score is `combine` of all readable passes, and the uncertainty their standard deviation. A
    sample without any readable pass is NaN with the reason. The raw texts are in `extras`.
    """

    def __post_init__(self) -> None:
        """Declare the reward."""
        super().__post_init__()
        self.spec = replace(self.declare(), version=self.version)

    @abstractmethod
    def declare(self) -> RewardSpec:
        """Return the declaration, without the version."""

    def combine(self, passes: Float[Tensor, "k m"]) -> Float[Tensor, "R"]:
        """Return a score per dimension from the values read in k passes. Default: their mean."""
        return passes.nanmean(0)

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
    @override
    def judge_calls(self, group_sizes: Sequence[int]) -> JudgeCalls:
        return self.calls(sum(group_sizes) * self.conversations)

    @final
    def rate(self, batch: MediaBatch) -> BatchScores:
        """Ask about all samples at the same time."""
        questions, failed = collect(batch, self.ask)
        verdicts = self.collect(list(questions.values()), self._read)
        values = torch.full((len(batch), len(self.spec.dims)), torch.nan)
        spread = values.clone()
        extras: list[Mapping[str, Any]] = [{} for _ in range(len(batch))]
        for i, verdict in zip(questions, verdicts, strict=True):
            extras[i] = {"texts": list(verdict.texts), "missing": list(verdict.missing)}
            if len(verdict.values):
                values[i] = self.combine(verdict.values).float()
                spread[i] = self._spread(verdict)
            else:
                failed[i] = verdict.missing[0]
        return BatchScores(
            values, spread if self.sampling.passes > 1 else None, failed, None, extras
        )

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
