"""Turn samples into questions of a poll, and store the votes in a table.

A question is a prompt with candidates to compare, also samples of a training run. The table has
JSON lines, which training and `flowalign pairs` read.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from flowalign.data.media_record import Record
from flowalign.data.preference.validate import Inspection
from flowalign.data.readers.formats import Row
from flowalign.data.readers.schema import REQUEST_MASK
from flowalign.functional.pairing import beaten_share
from flowalign.reports.records import read_json
from flowalign.reports.samples import cut_grid
from flowalign.utils.files import atomic_write, parse_json, sync_file, write_rows
from flowalign.utils.media.media import Media
from flowalign.utils.media.pixels import spread_frames


@dataclass(frozen=True)
class Question:
    """Prompt, and the candidates that annotators compare or rate."""

    id: str
    """Hash of the prompt and of the names of the candidates."""
    prompt: str
    candidates: Sequence[Media]
    references: Sequence[Media] = ()
    mask: Media | None = None
    """Inpainting mask of the request. None: no mask."""


def make_questions(records: Iterable[Record], most: int) -> tuple[list[Question], list[str]]:
    """Return the questions with at most `most` candidates each, and the unusable samples.

    A record with several samples is compared by itself. Records with one sample are compared with
    those of the same prompt, references and mask. A sample without another one is unusable.
    """
    groups: dict[tuple[str, ...], list[tuple[str, Media]]] = {}
    requests: dict[tuple[str, ...], Record] = {}
    problems, inspection = [], Inspection()
    for record in records:
        if problem := record.problem or _find_problem(record, inspection):
            problems.append(problem)
            continue
        key = (record.id,) if len(record.media) > 1 else _request_key(record)
        requests.setdefault(key, record)
        named = [(f"{record.id}#{i}", medium) for i, medium in enumerate(record.media)]
        groups.setdefault(key, []).extend(named)
    questions = []
    for key, candidates in groups.items():
        record = requests[key]
        if len(candidates) < 2:
            problems.append(f"no other sample of its prompt: {record.id}")
            continue
        for part in divide(candidates, most):
            names, media = zip(*part, strict=True)
            id = hash_names(record.prompt, names)
            questions.append(Question(id, record.prompt, media, record.references, record.mask))
    return questions, problems


def _find_problem(record: Record, inspection: Inspection) -> str:
    if any(medium.path is None for medium in (*record.media, *record.references)):
        return f"stored in the dataset: {record.id}"
    return next(filter(None, map(inspection.of_one, record.media)), "")


def divide(candidates: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    """Yield parts of nearly equal size with at most `most` candidates, and at least two.

    With `most` 2, an odd number gives one part of three.
    """
    count = min(-(-len(candidates) // most), len(candidates) // 2)
    ends = [round(i * len(candidates) / count) for i in range(count + 1)]
    yield from (candidates[a:b] for a, b in itertools.pairwise(ends))


def hash_names(prompt: str, names: Sequence[str]) -> str:
    """Return the id of a question."""
    return hashlib.sha256(json.dumps([prompt, *names]).encode()).hexdigest()[:12]


def _request_key(record: Record) -> tuple[str, ...]:
    sources = [medium.path or "" for medium in record.references]
    return record.prompt, *sources, record.mask.path or "" if record.mask else ""


def find_run_questions(run: Path, out: Path, most: int) -> list[Question]:
    """Return a question per fixed prompt of a run, with samples of up to `most` evaluations.

    Images are cut out of the grids and written to `out`.

    Raises:
        ValueError: The run has no prompt, or fewer than two evaluations with samples.
    """
    folder = run / "samples"
    index = read_json(folder / "index.json")
    prompts, steps = index.get("prompts", []), sorted(index.get("steps", []))
    if not prompts or len(steps) < 2:
        raise ValueError(f"{run} has samples of {len(steps)} evaluations; a vote needs two or more")
    chosen = [steps[i] for i in spread_frames(len(steps), most)]
    clips = bool(index.get("fps"))
    if not clips:
        for step in chosen:
            _cut(folder, out, step, len(prompts), index.get("columns", 1))
    questions = []
    for i, prompt in enumerate(prompts):
        id, source = hash_names(prompt, [*map(str, chosen)]), folder / "sources" / f"{i:03}.png"
        files = [out / _name(step, i) for step in chosen]
        if clips:
            files = [folder / f"step-{step:06}" / f"{i:03}.webp" for step in chosen]
        media = [Media(str(file)) for file in files]
        references = [Media(str(source))] if source.is_file() else []
        questions.append(Question(id, prompt, media, references))
    return questions


def _name(step: int, number: int) -> str:
    return f"step-{step:06}-{number:03}.png"


def _cut(folder: Path, out: Path, step: int, count: int, columns: int) -> None:
    with Image.open(folder / f"step-{step:06}.png") as grid:
        for i, picture in enumerate(cut_grid(grid.convert("RGB"), count, columns)):
            path = out / _name(step, i)
            if not path.exists():
                with atomic_write(path) as partial:
                    picture.save(partial, "PNG")


VOTES = "votes.jsonl"
_COLUMNS = dict.fromkeys(("id", "question", "user_id", "prompt"), str)
_COLUMNS |= {"images": list, "repeat": bool}
"""Columns of every vote, with their types."""


class VoteTable:
    """Table of votes, one row per vote, which is on the disk before the vote is confirmed.

    A row is a record of schema `generic`: `prompt`, `images`, and `ranks` or `ratings`. It also has
    the `question`, the annotator as `user_id`, and whether the question was a `repeat`. Half a row
    at the end, from a kill during a write, is no vote, because it was not confirmed.
    """

    def __init__(self, path: Path):
        self.path = path
        self.rows: dict[str, dict[str, Any]] = {}
        content = path.read_bytes() if path.exists() else b""
        lines = content.split(b"\n")
        for number, line in enumerate(lines, 1):
            try:
                row = parse_json(line)
                _check_vote(row)
                self.rows[row["id"]] = row
            except (ValueError, TypeError) as error:
                if number < len(lines) or isinstance(error, TypeError):
                    where = f"{path} line {number}"
                    raise ValueError(f"{where} is no vote: {error}: {line[:60]!r}") from error
        self._is_cut = bool(lines[-1])

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row, and wait until it is on the disk."""
        if self._is_cut:  # reading leaves the file as it is; the server, which adds, has a lock
            self._replace(self.rows)
        new = not self.path.exists()
        end = 0 if new else self.path.stat().st_size
        line = json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            os.truncate(self.path, end)  # or the next vote would follow half a row
            raise
        if new:
            sync_file(self.path.parent)
        self.rows[row["id"]] = dict(row)

    def remove(self, id: str) -> None:
        """Delete a row; the file is replaced at once."""
        self._replace({key: row for key, row in self.rows.items() if key != id})

    def _replace(self, rows: dict[str, dict[str, Any]]) -> None:
        write_rows(self.path, rows.values())
        sync_file(self.path.parent)
        self.rows, self._is_cut = rows, False

    def describe(self, question: Question) -> dict[str, Any]:
        """Return the columns of a question, with paths of files."""
        row = {"prompt": question.prompt, "images": [*map(self._relative, question.candidates)]}
        if question.references:
            row["references"] = [*map(self._relative, question.references)]
        return row | ({REQUEST_MASK: self._relative(question.mask)} if question.mask else {})

    def _relative(self, medium: Media) -> str:
        """Return the path of a file from the folder of the table, if both are in one folder."""
        path, folder = os.path.abspath(medium.path or ""), self.path.parent.absolute()
        near = Path(path).is_relative_to(folder.parent)
        return Path(os.path.relpath(path, folder)).as_posix() if near else path


def _check_vote(row: Any) -> None:
    """Raise TypeError unless a row has the columns of a vote."""
    if not isinstance(row, dict):
        raise TypeError("it is no object")
    for name, kind in _COLUMNS.items():
        if not isinstance(row.get(name), kind):
            raise TypeError(f"{name} is {row.get(name)!s:.40}")
    for name in ("ranks", "ratings"):
        answers = row.get(name, {})
        values: list[Any] = [*answers.values()] if isinstance(answers, dict) else [None]
        for one in values:
            fits = isinstance(one, list) and len(one) == len(row["images"])
            if not fits or not all(isinstance(x, int | float) for x in one):
                raise TypeError(f"{name} are no numbers of the {len(row['images'])} images")


def read_votes(path: Path) -> Iterator[Row]:
    """Yield a row per candidate, with the columns of a table of `flowalign score`.

    The score is the mean rating, or the share of the other candidates that a candidate beats. All
    votes count, also repeated ones.
    """
    table: dict[str, list[dict[str, Any]]] = {}
    for vote in VoteTable(path).rows.values():
        table.setdefault(vote["question"], []).append(vote)
    number = 0
    for votes in table.values():
        scores: dict[str, list[float]] = {}
        for column in ("ranks", "ratings"):
            for dim in dict.fromkeys(dim for vote in votes for dim in vote.get(column, ())):
                answers = torch.tensor([v[column][dim] for v in votes if dim in v.get(column, ())])
                mean = beaten_share(answers) if column == "ranks" else answers.double().mean(0)
                scores[dim] = mean.tolist()
        for i, row in enumerate(_candidates(votes[0], path.parent)):
            number += 1
            known = {dim: values[i] for dim, values in scores.items()}
            valid = {f"{dim}_valid": True for dim in scores}
            yield Row(number, path, row | {"medium": i} | known | valid)


def _candidates(vote: dict[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the columns of each candidate, with absolute paths."""

    def absolute(paths: list[str]) -> list[str]:
        return [os.path.abspath(folder / path) for path in paths]

    row = {"record": vote["question"], "prompt": vote["prompt"]}
    row["references"] = absolute(vote.get("references", []))
    if REQUEST_MASK in vote:
        (row[REQUEST_MASK],) = absolute([vote[REQUEST_MASK]])
    yield from (row | {"path": path} for path in absolute(vote["images"]))
