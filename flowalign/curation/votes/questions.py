"""Turn samples into questions: a prompt with the candidates that annotators compare."""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flowalign.data.media.media import Media
from flowalign.data.media_record import Record
from flowalign.data.readers.fields import REQUEST_MASK


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

    def columns(self) -> dict[str, Any]:
        """Return the columns of a table that describe the question, with paths of files."""
        row = {"prompt": self.prompt, "images": [one.path for one in self.candidates]}
        if self.references:
            row["references"] = [one.path for one in self.references]
        return row | ({REQUEST_MASK: self.mask.path} if self.mask else {})


def make_questions(records: Iterable[Record], most: int) -> tuple[list[Question], list[str]]:
    """Return the questions with at most `most` candidates each, and the unusable samples.

    A record with several samples is compared by itself. Records with one sample are compared with
    those of the same prompt, references and mask. A sample without another one is unusable.
    """
    groups: dict[tuple[str, ...], list[tuple[str, Media]]] = {}
    requests: dict[tuple[str, ...], Record] = {}
    problems = []
    for record in records:
        stored = any(m.path is None for m in (*record.media, *record.references))
        if record.problem or stored:
            problems.append(record.problem or f"stored in the dataset: {record.id}")
            continue
        key = (record.id,) if len(record.media) > 1 else _request_key(record)
        requests.setdefault(key, record)
        named = [(f"{record.id}#{i}", medium) for i, medium in enumerate(record.media)]
        groups.setdefault(key, []).extend(named)
    questions = []
    for key, candidates in groups.items():
        if len(candidates) < 2:
            problems.append(f"no other sample of its prompt: {candidates[0][0].rpartition('#')[0]}")
            continue
        questions += [_question(requests[key], part) for part in divide(candidates, most)]
    return questions, problems


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


def _question(record: Record, candidates: Sequence[tuple[str, Media]]) -> Question:
    names, media = [name for name, _ in candidates], [medium for _, medium in candidates]
    id = hash_names(record.prompt, names)
    return Question(id, record.prompt, media, record.references, record.mask)


def _request_key(record: Record) -> tuple[str, ...]:
    sources = [medium.path or "" for medium in record.references]
    return record.prompt, *sources, record.mask.path or "" if record.mask else ""
