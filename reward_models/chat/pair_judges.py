"""Defines judges of pairs, and turns any of them into a reward: the win rate in a group."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import comb
from typing import Any, Literal, final

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.types import JudgeCalls, MediaBatch, RewardOutput, RewardSpec
from reward_models.backbones.reward_bases import Composed
from reward_models.chat.chat_client import ChatAnswer, Messages
from reward_models.chat.judge import Judge, Verdict
from reward_models.chat.parsers import Unparsable


def read_winner(found: Sequence[tuple[str, str]]) -> float:
    """Return 1 if the matches name the first, 0 for the second, 0.5 for a tie.

    Each match is (`1` or `2`, tie).

    Raises:
        Unparsable: There is no match, or the matches contradict each other.
    """
    said = {{"1": 1.0, "2": 0.0}.get(which, 0.5) for which, _ in found}
    if len(said) != 1:
        raise Unparsable("no verdict" if not said else "verdicts that contradict each other")
    return said.pop()


@dataclass(eq=False, repr=False)
class PairJudge(Judge):
    """Judge that compares two samples of one prompt in each dimension of its `spec`."""

    def __post_init__(self) -> None:
        """Declare the comparison."""
        super().__post_init__()
        self.spec = replace(self.declare(), version=self.version)

    @abstractmethod
    def declare(self) -> RewardSpec:
        """Return the declaration, without the version."""

    @abstractmethod
    def ask(self, first: MediaBatch, second: MediaBatch) -> Sequence[Messages]:
        """Return the conversations about two batches of one."""

    @abstractmethod
    def read(self, answers: Sequence[ChatAnswer]) -> Sequence[float]:
        """Return the result of the first sample per dimension: 1 wins, 0 loses, 0.5 is a tie.

        Raises:
            Unparsable: The answer cannot be read. The judge is asked again.
        """

    @final
    def compare(self, pairs: Sequence[tuple[MediaBatch, MediaBatch]]) -> list[Verdict]:
        """Return one verdict per pair; its `missing` lists reasons of unreadable passes."""
        return self.collect([self.ask(*pair) for pair in pairs], self._read)

    def _read(self, answers: Sequence[ChatAnswer]) -> Sequence[float]:
        values = self.read(answers)
        if not all(0 <= value <= 1 for value in values):
            raise Unparsable(f"preferences {list(values)} outside [0, 1]")
        return values


@dataclass(frozen=True)
class _Duel:
    """Comparison of two samples of a group.

    `score` is the score of the first sample, or None if a verdict is missing.
    """

    first: int
    second: int
    score: Float[Tensor, "R"] | None
    contradicted: bool
    missing: Sequence[str]
    texts: Sequence[str]


class WinRate(Composed):
    """Scores the share of the other samples of its group that a sample beats; a tie is half a win.

    All pairs of a group are compared. With `orders: both` each pair is shown in both orders and the
    two verdicts are averaged, which cancels a position bias. A pair that lacks a verdict in one of
    the orders counts for neither sample. Pref-GRPO, the source of this reward, asks in one order
    and counts an unreadable answer as half a win.
    """

    def __init__(self, judge: PairJudge, orders: Literal["both", "one"] = "both"):
        self.judge, self.orders = judge, orders
        spec = judge.spec
        self.spec = replace(
            spec,
            name=f"{spec.name}_win_rate",
            scale=(0.0, 1.0),
            needs=(*spec.needs, "groups"),
            version=f"{spec.version} {orders}",
        )

    def close(self) -> None:
        """Close the connections."""
        self.judge.close()

    @override
    def judge_calls(self, group_sizes: Sequence[int]) -> JudgeCalls:
        pairs = sum(comb(size, 2) for size in group_sizes)
        turns = 2 if self.orders == "both" else 1
        return self.judge.calls(pairs * turns * self.judge.conversations)

    def score(self, batch: MediaBatch) -> RewardOutput:
        """Compare all pairs of all groups at the same time."""
        failed = self.spec.screen(batch)
        self.load()
        groups: dict[int, list[int]] = {}
        for i in (i for i in range(len(batch)) if i not in failed):
            groups.setdefault(batch.groups[i], []).append(i)
        for group, members in groups.items():
            _check_group(batch, group, members)
        duels = self._duels(batch, [p for m in groups.values() for p in combinations(m, 2)])
        values = torch.full((len(batch), len(self.spec.dims)), torch.nan)
        extras: list[Mapping[str, Any]] = [{} for _ in range(len(batch))]
        for i in (i for members in groups.values() for i in members):
            mine = [d for d in duels if i in (d.first, d.second)]
            scores = [_score_for(i, d) for d in mine if d.score is not None]
            extras[i] = _summarise(mine)
            if scores:
                values[i] = torch.stack(scores).mean(0).float()
            else:
                failed[i] = next(
                    (r for d in mine for r in d.missing), "its group has no other sample"
                )
        return RewardOutput.build(self.spec, values, failed, extras=extras)

    def _duels(self, batch: MediaBatch, pairs: Sequence[tuple[int, int]]) -> list[_Duel]:
        """Return one duel per pair, from one or two comparisons each."""
        rows = {i: batch.take([i]) for i in {i for pair in pairs for i in pair}}
        asked = [(rows[i], rows[j]) for i, j in pairs]
        swapped = [(b, a) for a, b in asked] if self.orders == "both" else []
        verdicts = self.judge.compare([*asked, *swapped])
        turns = zip(verdicts[: len(pairs)], verdicts[len(pairs) :] or verdicts, strict=True)
        return [_average_verdicts(*pair, *turn) for pair, turn in zip(pairs, turns, strict=True)]


def _check_group(batch: MediaBatch, group: int, members: Sequence[int]) -> None:
    """Raise ValueError if a group's samples do not share one request."""
    if len(prompts := {batch.prompts[i] for i in members}) > 1:
        raise ValueError(f"group {group} has samples of {len(prompts)} different prompts")
    shared = batch.references[members[0]] if batch.references else ()
    for i in members[1:] if batch.references else ():
        own = batch.references[i]
        if len(own) != len(shared) or not all(map(torch.equal, own, shared)):
            raise ValueError(f"group {group} has samples of different references")


def _average_verdicts(first: int, second: int, straight: Verdict, swapped: Verdict) -> _Duel:
    """Average a pair's verdicts; `swapped` is `straight` if it was shown in one order only."""
    turns = [straight] if swapped is straight else [straight, swapped]
    missing = [v.missing[0] for v in turns if len(v.values) == 0]
    texts = [text for v in turns for text in v.texts]
    if missing:
        return _Duel(first, second, None, False, missing, texts)
    scores = [straight.values.nanmean(0)]
    if swapped is not straight:
        scores.append(1 - swapped.values.nanmean(0))
    contradicted = len(scores) == 2 and bool(((scores[0] - 0.5) * (scores[1] - 0.5) < 0).any())
    return _Duel(first, second, torch.stack(scores).mean(0), contradicted, (), texts)


def _score_for(i: int, duel: _Duel) -> Float[Tensor, "R"]:
    assert duel.score is not None
    return duel.score if i == duel.first else 1 - duel.score


def _summarise(duels: Sequence[_Duel]) -> Mapping[str, Any]:
    """Return a summary of a sample's comparisons for the extras."""
    decided = [d for d in duels if d.score is not None]
    return {
        "pairs": len(duels),
        "missing": [reason for d in duels for reason in d.missing],
        "disagreement": sum(d.contradicted for d in decided) / len(decided) if decided else None,
        "texts": [text for d in duels for text in d.texts],
    }
