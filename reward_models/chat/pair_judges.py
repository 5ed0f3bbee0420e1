"""Defines judges of pairs, and turns any of them into a reward: the win rate in a group."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import comb
from statistics import fmean
from typing import Any, Literal, final

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.types import JudgeCalls, MediaBatch, RewardSpec
from reward_models.backbones.reward_bases import BatchScores, Composed, ScreenedReward
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


def compare_scores(first: float, second: float) -> float:
    """Return 1 if the first is higher, 0 if the second is, 0.5 if both are equal."""
    return 0.5 if first == second else float(first > second)


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
    """Comparison of two samples of a group."""

    pair: tuple[int, int]
    missing: Sequence[str]
    """Reasons of missing verdicts; if there are any, the duel has no score."""
    texts: Sequence[str]
    score: Float[Tensor, "R"] = field(default_factory=lambda: torch.empty(0))
    """Score of the first sample."""
    contradicted: bool = False


class WinRate(Composed, ScreenedReward):
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

    @override
    def judge_calls(self, group_sizes: Sequence[int]) -> JudgeCalls:
        pairs = sum(comb(size, 2) for size in group_sizes)
        turns = 2 if self.orders == "both" else 1
        return self.judge.calls(pairs * turns * self.judge.conversations)

    def rate(self, batch: MediaBatch) -> BatchScores:
        """Compare all pairs of all groups at the same time."""
        groups: dict[int, list[int]] = {}
        for i, group in enumerate(batch.groups):
            groups.setdefault(group, []).append(i)
        for group, members in groups.items():
            _check_group(batch, group, members)
        duels = self._duels(batch, [p for m in groups.values() for p in combinations(m, 2)])
        values = torch.full((len(batch), len(self.spec.dims)), torch.nan)
        extras: list[Mapping[str, Any]] = [{} for _ in range(len(batch))]
        failed: dict[int, str] = {}
        for i in range(len(batch)):
            mine = [d for d in duels if i in d.pair]
            scored = [d for d in mine if not d.missing]
            missing = [reason for d in mine for reason in d.missing]
            extras[i] = {
                "pairs": len(mine),
                "missing": missing,
                "disagreement": fmean(d.contradicted for d in scored) if scored else None,
                "texts": [text for d in mine for text in d.texts],
            }
            if scored:
                scores = [d.score if i == d.pair[0] else 1 - d.score for d in scored]
                values[i] = torch.stack(scores).mean(0).float()
            else:
                failed[i] = missing[0] if missing else "its group has no other sample"
        return BatchScores(values, failed=failed, extras=extras)

    def _duels(self, batch: MediaBatch, pairs: Sequence[tuple[int, int]]) -> list[_Duel]:
        """Return one duel per pair, from one or two comparisons each."""
        rows = {i: batch.take([i]) for i in {i for pair in pairs for i in pair}}
        asked = [(rows[i], rows[j]) for i, j in pairs]
        if self.orders == "both":
            asked += [(second, first) for first, second in asked]
        verdicts = self.judge.compare(asked)
        return [_average_verdicts(p, verdicts[k :: len(pairs)]) for k, p in enumerate(pairs)]


def _check_group(batch: MediaBatch, group: int, members: Sequence[int]) -> None:
    """Raise ValueError if a group's samples do not share one request."""
    if len(prompts := {batch.prompts[i] for i in members}) > 1:
        raise ValueError(f"group {group} has samples of {len(prompts)} different prompts")
    shared, *others = (batch.references[i] if batch.references else () for i in members)
    if not all(len(o) == len(shared) and all(map(torch.equal, o, shared)) for o in others):
        raise ValueError(f"group {group} has samples of different references")


def _average_verdicts(pair: tuple[int, int], turns: Sequence[Verdict]) -> _Duel:
    """Average a pair's verdicts, the second of which was shown in the other order."""
    missing = [v.missing[0] for v in turns if len(v.values) == 0]
    texts = [text for v in turns for text in v.texts]
    if missing:
        return _Duel(pair, missing, texts)
    scores = torch.stack([v.values.nanmean(0) for v in turns])
    scores[1:] = 1 - scores[1:]
    contradicted = len(turns) == 2 and bool(((scores - 0.5).prod(0) < 0).any())
    return _Duel(pair, (), texts, scores.mean(0), contradicted)
