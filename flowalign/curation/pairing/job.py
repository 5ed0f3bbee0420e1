"""Chooses pairs from a table of scores, and writes them as a preference dataset."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.curation.pairing.rules import Choice, Rule, staged
from flowalign.curation.pairing.table import Medium, Table
from flowalign.data.preference.dropped import DropReport
from flowalign.data.preference.validate import Inspection
from flowalign.data.readers.fields import REQUEST_MASK
from flowalign.media.media import Media
from flowalign.utils.files import atomic_write

TRAIN, HELD_OUT, SUMMARY, PAGE = "train.jsonl", "held_out.jsonl", "summary.json", "pairs.html"
FILES = (TRAIN, HELD_OUT, SUMMARY, PAGE)


@dataclass(frozen=True)
class Job:
    """Configures how pairs are made from a table of scores."""

    table: Table
    rule: Rule
    by_record: bool = False
    """Whether only media of one record are compared; otherwise all media of one prompt, and of one
    source where they are edits."""
    stages: int = 0
    """Number of stages of a curriculum; 0: no curriculum."""
    stages_by: str = "score"
    """Division into stages: `score` by equal ranges of gaps, `rank` into equally many pairs."""
    mixed_shapes: bool = False
    """Whether media of different sizes or numbers of frames may be a pair."""
    mask: str | None = None
    """Name of the reward whose maps are the masks of pairs, or weigh the places of single media;
    null: none."""

    def __post_init__(self) -> None:
        """Reject maps that no medium has."""
        known = sorted({name for medium in self.table.media for name in medium.maps})
        if self.mask is not None and self.mask not in known:
            raise ValueError(
                f"--mask {self.mask!r}: the table has maps of {', '.join(known) or 'no reward'}"
            )

    @cached_property
    def total(self) -> Float[Tensor, "n"]:
        """Weighted sum of every row; computed once, so that equal totals stay equal everywhere."""
        return self.rule.total(self.table.scores)


@dataclass(frozen=True)
class Found:
    """Holds the chosen pairs, and reports the media and pairs that were dropped."""

    choices: Sequence[Choice]
    prompts: int
    """Number of prompts that have a pair."""
    media: DropReport = field(default_factory=DropReport)
    """Rows of the table that were not compared."""
    pairs: DropReport = field(default_factory=DropReport)
    """Pairs that were chosen, but cannot be trained on."""


def find(job: Job) -> Found:
    """Choose pairs, prompt by prompt, in the order in which prompts first appear.

    Raises:
        ValueError: No prompt has two media.
    """
    table, inspection, media, pairs = job.table, Inspection(), DropReport(), DropReport()
    if all(len(rows) < 2 for rows in _groups(job, range(len(table.media)))):
        what = "record" if job.by_record else "prompt"
        raise ValueError(f"every {what} has one medium, so there is nothing to compare")
    choices: list[Choice] = []
    for rows in _groups(job, _usable(job, inspection, media)):
        if len(rows) < 2:
            media.add("nothing to compare with", table.media[rows[0]].name)
            continue
        places = torch.tensor(rows)
        for choice in job.rule.choose(places, table.scores[places], job.total[places]):
            winner, loser = table.media[choice.winner], table.media[choice.loser]
            sides = Media(winner.path), Media(loser.path)
            if problem := inspection.of_pair(*sides, job.mixed_shapes):
                pairs.add(problem, winner.name)
            else:
                choices.append(choice)
    prompts = len({request(table.media[choice.winner]) for choice in choices})
    if job.stages:
        choices = staged(choices, job.stages, job.stages_by)
    return Found(choices, prompts, media, pairs)


def _usable(job: Job, inspection: Inspection, report: DropReport) -> Iterator[int]:
    """Yield rows with a score and a file, no file twice for a prompt; report the others."""
    known = job.table.scores.isfinite()
    scored = (known.all(1) if job.rule.needs_all else known.any(1)).tolist()
    seen: set[tuple[str, ...]] = set()
    for i, medium in enumerate(job.table.media):
        place = (*_group(job, i), medium.path)
        if not scored[i]:
            report.add(
                "no valid score" + (f": {medium.reason}" if medium.reason else ""), medium.name
            )
        elif not medium.path:
            report.add("held by the dataset itself, not a file", medium.name)
        elif "" in _sources(medium):
            report.add("source held by the dataset itself, not a file", medium.name)
        elif problem := inspection.missing(medium.path, *_sources(medium)):
            report.add(problem, medium.name)
        elif place in seen:
            report.add("repeated medium", medium.name)
        else:
            seen.add(place)
            yield i


def request(medium: Medium) -> tuple[str, ...]:
    """Return what a medium answers: its prompt, and the references and mask that came with it."""
    return medium.prompt, *_sources(medium)


def _sources(medium: Medium) -> tuple[str, ...]:
    return medium.references if medium.mask is None else (*medium.references, medium.mask)


def _group(job: Job, i: int) -> tuple[str, ...]:
    """Return the group within which a medium is compared: its request, or its record."""
    medium = job.table.media[i]
    by_record = job.by_record or not medium.prompt or "" in _sources(medium)
    return *request(medium), medium.record if by_record else ""


def _groups(job: Job, rows: Iterable[int]) -> Iterable[list[int]]:
    found: dict[tuple[str, ...], list[int]] = {}
    for i in rows:
        found.setdefault(_group(job, i), []).append(i)
    return found.values()


def split(
    table: Table, choices: Sequence[Choice], fraction: float, seed: int
) -> tuple[list[Choice], list[Choice]]:
    """Split pairs into those to train on and those held out, by a hash of request and seed."""
    train, held_out = [], []
    for choice in choices:
        asked = "\0".join(request(table.media[choice.winner]))
        digest = hashlib.blake2b(f"{seed} {asked}".encode(), digest_size=8).digest()
        (held_out if int.from_bytes(digest) < fraction * 2**64 else train).append(choice)
    return train, held_out


def line(job: Job, choice: Choice) -> dict[str, Any]:
    """Return a pair as a row of schema chosen_rejected."""
    winner, loser = job.table.media[choice.winner], job.table.media[choice.loser]
    row = {
        "prompt": winner.prompt,
        "chosen": winner.path,
        "rejected": loser.path,
        "dimension": choice.dimension,
        "gap": choice.gap,
        "scores_chosen": scores(job, choice.winner),
        "scores_rejected": scores(job, choice.loser),
        **_given(winner),
        **_masks(job.mask, mask=winner, mask_rejected=loser),
    }
    return row | {"stage": choice.stage} if job.stages else row


def labelled(job: Job, choices: Sequence[Choice]) -> list[dict[str, Any]]:
    """Return rows of schema kto: each medium of the pairs once, and whether it won.

    A medium that wins one pair and loses another is left out.
    """
    won, lost = {c.winner for c in choices}, {c.loser for c in choices}
    return [
        {
            "prompt": job.table.media[row].prompt,
            "completion": job.table.media[row].path,
            "label": row in won,
            "scores": scores(job, row),
            **_given(job.table.media[row]),
            **_masks(job.mask, weight_map=job.table.media[row]),
        }
        for row in sorted(won ^ lost)
    ]


def _given(medium: Medium) -> dict[str, Any]:
    """Return the columns of what came with the prompt."""
    found: dict[str, Any] = {"references": list(medium.references)} if medium.references else {}
    return found | ({REQUEST_MASK: medium.mask} if medium.mask else {})


def _masks(reward: str | None, **media: Medium) -> dict[str, Any]:
    """Return the columns of the maps of media, of those that have one."""
    if reward is None:
        return {}
    return {name: medium.maps[reward] for name, medium in media.items() if reward in medium.maps}


def scores(job: Job, row: int) -> dict[str, float]:
    """Return the finite scores of a row by dimension, with the total if the rule compares it."""
    values = job.table.scores[row]
    named = zip(job.table.dims, values.tolist(), strict=True)
    found = {dim: value for dim, value in named if value == value}
    if job.rule.needs_all and job.rule.decides not in found:
        found[job.rule.decides] = job.total[row].item()
    return found


def write(folder: Path, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as a JSONL file, atomically."""
    lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    with atomic_write(folder / name) as partial, partial.open("w", encoding="utf-8") as file:
        file.writelines(lines)


def check_folder(folder: Path) -> None:
    """Raise ValueError if a folder holds other files; earlier pairs in it will be replaced."""
    others = sorted(p.name for p in folder.glob("*") if p.name not in FILES)
    if others:
        raise ValueError(f"{folder} holds {others[0]!r}, which is not of `flowalign pairs`")
