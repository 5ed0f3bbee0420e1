"""Choose the next question of an annotator, check and record votes, and measure agreement."""

import hashlib
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from flowalign.curation.votes.questions import Question, VoteTable
from flowalign.functional.agreement import krippendorff_alpha
from flowalign.utils.errors import require_known
from flowalign.utils.seeds import is_in_share

Kind = Literal["best", "rank", "rate"]
KINDS: tuple[Kind, ...] = ("best", "rank", "rate")
_BETWEEN = 10
"""Smallest number of other votes between a question and its repeat, unless nothing else is left."""


@dataclass(frozen=True, kw_only=True)
class PollSettings:
    """Task of the annotators."""

    kind: Kind = "best"
    dimensions: Sequence[str] = ("overall",)
    """Names of the rated dimensions; `best` and `rank` have one."""
    scale: int = 5
    """Highest rating; the lowest is 1."""
    annotators: int = 1
    """Number of annotators per question."""
    repeats: float = 0.0
    """Share of the questions that an annotator sees twice."""

    def __post_init__(self) -> None:
        """Raise ValueError for settings that contradict each other."""
        require_known("--ask is", [self.kind], KINDS)
        if self.kind != "rate" and len(self.dimensions) != 1:
            raise ValueError(f"--ask {self.kind} takes one dimension, got {self.dimensions}")

    @property
    def column(self) -> str:
        """Column of the answers in the table."""
        return "ratings" if self.kind == "rate" else "ranks"


class Task(NamedTuple):
    """Question for an annotator, with its candidates in a random order."""

    question: Question
    order: Sequence[int]
    repeat: bool


class Poll:
    """Questions and their votes; several threads may use it."""

    def __init__(self, settings: PollSettings, table: VoteTable, questions: Iterable[Question]):
        self.settings, self.table = settings, table
        self.questions: dict[str, Question] = {}
        self.changed = threading.Condition()
        self._repeated: set[str] = set()
        for question in questions:
            self.add(question)
        self._shown: dict[str, str] = {}  # annotator by question that was handed out last

    def add(self, question: Question) -> None:
        """Add a question, if it is new."""
        with self.changed:
            self.questions.setdefault(question.id, question)
            if is_in_share(question.id, self.settings.repeats, 0):
                self._repeated.add(question.id)
            self.changed.notify_all()

    def next(self, annotator: str, skip: int = 0) -> Task | None:
        """Return the next question of an annotator, after `skip` others; None if none is left."""
        with self.changed:
            mine = self._votes(annotator)
            asked = [row["question"] for row in mine]
            due = self._find_due(asked)
            early = [id for id in due if id in asked[-_BETWEEN:]]
            late = [id for id in due if id not in early]
            left = [*late, *self._open_questions(asked, annotator), *early]
            if not left:
                return None
            found = left[skip % len(left)]
            self._shown[found] = annotator
            order = list(range(len(self.questions[found].candidates)))
            seed = hashlib.sha256(f"{annotator} {found} {found in asked}".encode()).digest()
            random.Random(seed).shuffle(order)
            return Task(self.questions[found], order, found in asked)

    def vote(self, annotator: str, id: str, answers: object, seconds: float) -> None:
        """Check a vote and store it.

        Raises:
            ValueError: The question is unknown or already answered, or the answers do not fit.
        """
        if not annotator.strip() or len(annotator) > 100:
            raise ValueError(f"annotator must be a name of up to 100 letters, got {annotator!r}")
        with self.changed:
            if id not in self.questions:
                raise ValueError(f"there is no question {id!r}")
            question, repeat = self.questions[id], f"{id}/{annotator}" in self.table.rows
            key = f"{id}/{annotator}/again" if repeat else f"{id}/{annotator}"
            if key in self.table.rows or (repeat and id not in self._repeated):
                raise ValueError(f"{annotator} has already answered question {id}")
            self.table.add(
                {
                    "id": key,
                    **self.table.describe(question),
                    self.settings.column: self._check(answers, len(question.candidates)),
                    "question": id,
                    "user_id": annotator,
                    "repeat": repeat,
                    "seconds": round(seconds, 1),
                    "time": round(time.time(), 1),
                }
            )
            self.changed.notify_all()

    def undo(self, annotator: str) -> None:
        """Delete the last vote of an annotator, if there is one."""
        with self.changed:
            if mine := self._votes(annotator):
                self.table.remove(mine[-1]["id"])

    def count(self, annotator: str) -> tuple[int, int]:
        """Return the number of votes of an annotator, and of questions that are left for them."""
        with self.changed:
            asked = [row["question"] for row in self._votes(annotator)]
            left = self._open_questions(asked, annotator) + self._find_due(asked)
            return len(asked), len(left)

    def answers(self, id: str) -> list[Mapping[str, Sequence[int]]]:
        """Return the answers to a question, without repeats."""
        rows = [r for r in self.table.rows.values() if r["question"] == id and not r["repeat"]]
        return [row[self.settings.column] for row in rows if self.settings.column in row]

    def is_answered(self, id: str) -> bool:
        """Return whether enough annotators answered a question."""
        return len(self.answers(id)) >= self.settings.annotators

    def _votes(self, annotator: str) -> list[dict[str, Any]]:
        return [row for row in self.table.rows.values() if row["user_id"] == annotator]

    def _open_questions(self, asked: Sequence[str], annotator: str) -> list[str]:
        """Return open questions, those that another annotator currently sees last."""
        voted = Counter(row["question"] for row in self.table.rows.values() if not row["repeat"])
        enough, known = self.settings.annotators, set(asked)
        found = [q for q in self.questions if q not in known and voted[q] < enough]
        return sorted(found, key=lambda q: self._shown.get(q, annotator) != annotator)

    def _find_due(self, asked: Sequence[str]) -> list[str]:
        """Return the questions that an annotator answered once and is asked again."""
        times = Counter(asked)
        return [id for id in asked if times[id] == 1 and id in self._repeated]

    def _check(self, answers: object, count: int) -> dict[str, list[int]]:
        """Return the answers of a vote by dimension; raise ValueError if they are no vote."""
        most = self.settings.scale if self.settings.kind == "rate" else count
        dims = list(self.settings.dimensions)
        if not isinstance(answers, dict) or sorted(answers) != sorted(dims):
            raise ValueError(f"a vote must answer {', '.join(dims)}, got {answers!r:.80}")
        for dim, values in answers.items():
            fits = isinstance(values, list) and len(values) == count
            if not (fits and all(type(v) is int and 1 <= v <= most for v in values)):
                wanted = f"{count} whole numbers in [1, {most}]"
                raise ValueError(f"{dim} must be {wanted}, got {values!r:.80}")
        return {dim: answers[dim] for dim in dims}


class Agreement(NamedTuple):
    """Agreement in one dimension."""

    alpha: float
    """Krippendorff's alpha between annotators; NaN if no question has two of them."""
    repeats: float
    """Alpha between the first and the second answer of the same annotator; NaN without repeats."""


def measure_agreement(poll: Poll) -> dict[str, Agreement]:
    """Return the agreement by dimension.

    The units are candidates, for ratings, or ordered pairs of candidates: 1 if the first one is
    better, -1 if the second one is, 0 for a tie. Both orders are units, so that chance has no
    preferred order. The distance is the interval distance.
    """
    column = poll.settings.column
    with poll.changed:
        rows = [row for row in poll.table.rows.values() if column in row]
    found = {}
    for dim in poll.settings.dimensions:
        of_all: dict[str, list[Sequence[int]]] = {}
        of_each: dict[tuple[str, str], list[Sequence[int]]] = {}
        for row in rows:
            answer = row[column].get(dim, ())
            of_each.setdefault((row["question"], row["user_id"]), []).append(answer)
            if not row["repeat"]:
                of_all.setdefault(row["question"], []).append(answer)
        found[dim] = Agreement(_alpha(of_all.values(), column), _alpha(of_each.values(), column))
    return found


def _alpha(questions: Iterable[Sequence[Sequence[int]]], column: str) -> float:
    """Return alpha of the answers to each question."""
    shared = [answers for answers in questions if len(answers) > 1]
    if not shared:
        return math.nan
    most = max(map(len, shared))
    empty = [math.nan] * max(len(answer) for answers in shared for answer in answers)
    rows = [
        [*((*one, *empty[len(one) :]) for one in answers), *[empty] * (most - len(answers))]
        for answers in shared
    ]
    values = torch.tensor(rows, dtype=torch.float64)
    if column == "ranks":
        itself = torch.eye(len(empty), dtype=torch.bool)
        orders = (values[..., None, :] - values[..., None]).sign()
        values = orders.masked_fill(itself, math.nan).flatten(2)
    return krippendorff_alpha(values.transpose(1, 2).flatten(0, 1), "interval")
