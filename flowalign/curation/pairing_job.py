"""Choose pairs from a table of scores, and write them as a preference dataset with a page."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.curation.score_table import (
    PairChoice,
    PairingRule,
    ScoredMedium,
    ScoreTable,
    assign_stages,
)
from flowalign.data.preference.validate import DropReport, Inspection
from flowalign.data.readers.schema import REQUEST_MASK
from flowalign.reports.pages import data_address, histogram, render
from flowalign.utils.errors import require_known
from flowalign.utils.folders import check_folder_path
from flowalign.utils.media.encode import read_thumbnail
from flowalign.utils.media.media import Media, MediaProblem
from flowalign.utils.seeds import is_in_share

TRAIN, HELD_OUT, SUMMARY, PAGE = "train.jsonl", "held_out.jsonl", "summary.json", "pairs.html"
FILES = (TRAIN, HELD_OUT, SUMMARY, PAGE)


@dataclass(frozen=True)
class PairingJob:
    """Settings for making pairs from a table of scores."""

    table: ScoreTable
    rule: PairingRule
    by_record: bool = False
    """Whether only samples of one record are compared. Otherwise all samples of one prompt are
    compared; in editing tasks, all samples of one prompt and source."""
    stages: int = 0
    """Number of stages of a curriculum; 0: no curriculum."""
    stages_by: str = "score"
    """Division into stages: `score` by equal ranges of gaps, `rank` into equally many pairs."""
    mixed_shapes: bool = False
    """Whether samples of different sizes or numbers of frames may form a pair."""
    mask: str | None = None
    """Reward that provides maps, as masks of pairs or as weight maps of single samples. None: no
    maps."""

    def __post_init__(self) -> None:
        """Raise ValueError for a mask that no sample has."""
        known = sorted({name for medium in self.table.media for name in medium.maps})
        if self.mask is not None:
            require_known("--mask must name a reward with maps, not", [self.mask], known)

    @cached_property
    def total(self) -> Float[Tensor, "n"]:
        """Weighted sum of every row, computed once so that equal totals stay equal everywhere."""
        return self.rule.total(self.table.scores)


@dataclass(frozen=True)
class PairSelection:
    """Chosen pairs, and reports of the samples and pairs that were dropped."""

    choices: Sequence[PairChoice]
    prompts: int
    """Number of prompts that have a pair."""
    media: DropReport = field(default_factory=DropReport)
    """Rows of the table that were not compared."""
    pairs: DropReport = field(default_factory=DropReport)
    """Pairs that were chosen, but cannot be trained on."""


def find_pairs(job: PairingJob) -> PairSelection:
    """Choose pairs, prompt by prompt, in the order in which prompts first appear.

    Raises:
        ValueError: No prompt has two samples.
    """
    table, inspection, media, pairs = job.table, Inspection(), DropReport(), DropReport()
    if all(len(rows) < 2 for rows in _group_rows(job, range(len(table.media)))):
        what = "record" if job.by_record else "prompt"
        raise ValueError(f"every {what} has only one sample, so there is nothing to compare")
    choices: list[PairChoice] = []
    for rows in _group_rows(job, _select_usable(job, inspection, media)):
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
    prompts = len({table.media[choice.winner].request for choice in choices})
    if job.stages:
        choices = assign_stages(choices, job.stages, job.stages_by)
    return PairSelection(choices, prompts, media, pairs)


def _select_usable(job: PairingJob, inspection: Inspection, report: DropReport) -> Iterator[int]:
    """Yield rows with a score and a file, each file once per prompt; report the remaining rows."""
    known = job.table.scores.isfinite()
    scored = (known.all(1) if job.rule.needs_all else known.any(1)).tolist()
    seen: set[tuple[str, ...]] = set()
    for i, medium in enumerate(job.table.media):
        place = (*_group_key(job, i), medium.path)
        if not scored[i]:
            report.add(
                "no valid score" + (f": {medium.reason}" if medium.reason else ""), medium.name
            )
        elif not medium.path:
            report.add("stored in the dataset instead of a file", medium.name)
        elif "" in medium.sources:
            report.add("source stored in the dataset instead of a file", medium.name)
        elif problem := inspection.missing(medium.path, *medium.sources):
            report.add(problem, medium.name)
        elif place in seen:
            report.add("repeated item", medium.name)
        else:
            seen.add(place)
            yield i


def _group_key(job: PairingJob, i: int) -> tuple[str, ...]:
    """Return the group in which a sample is compared: its request, or its record."""
    medium = job.table.media[i]
    by_record = job.by_record or not medium.prompt or "" in medium.sources
    return *medium.request, medium.record if by_record else ""


def _group_rows(job: PairingJob, rows: Iterable[int]) -> Iterable[list[int]]:
    found: dict[tuple[str, ...], list[int]] = {}
    for i in rows:
        found.setdefault(_group_key(job, i), []).append(i)
    return found.values()


def split(
    table: ScoreTable, choices: Sequence[PairChoice], fraction: float, seed: int
) -> tuple[list[PairChoice], list[PairChoice]]:
    """Split pairs into training pairs and held-out pairs, by a hash of request and seed."""
    train, held_out = [], []
    for choice in choices:
        asked = "\0".join(table.media[choice.winner].request)
        (held_out if is_in_share(asked, fraction, seed) else train).append(choice)
    return train, held_out


def format_pair(job: PairingJob, choice: PairChoice) -> dict[str, Any]:
    """Return a pair as a row of schema chosen_rejected."""
    winner, loser = job.table.media[choice.winner], job.table.media[choice.loser]
    row = {
        "prompt": winner.prompt,
        "chosen": winner.path,
        "rejected": loser.path,
        "dimension": choice.dimension,
        "gap": choice.gap,
        "scores_chosen": collect_scores(job, choice.winner),
        "scores_rejected": collect_scores(job, choice.loser),
        **_request_columns(winner),
        **_map_columns(job.mask, mask=winner, mask_rejected=loser),
    }
    return row | {"stage": choice.stage} if job.stages else row


def format_samples(job: PairingJob, choices: Sequence[PairChoice]) -> list[dict[str, Any]]:
    """Return rows of schema kto: each sample of the pairs once, and whether it won.

    A sample that wins one pair and loses another is left out.
    """
    won, lost = {c.winner for c in choices}, {c.loser for c in choices}
    return [
        {
            "prompt": job.table.media[row].prompt,
            "completion": job.table.media[row].path,
            "label": row in won,
            "scores": collect_scores(job, row),
            **_request_columns(job.table.media[row]),
            **_map_columns(job.mask, weight_map=job.table.media[row]),
        }
        for row in sorted(won ^ lost)
    ]


def _request_columns(medium: ScoredMedium) -> dict[str, Any]:
    """Return the columns of references and mask of the request."""
    found: dict[str, Any] = {"references": list(medium.references)} if medium.references else {}
    return found | ({REQUEST_MASK: medium.mask} if medium.mask else {})


def _map_columns(reward: str | None, **media: ScoredMedium) -> dict[str, Any]:
    """Return the columns of maps, for samples that have one."""
    if reward is None:
        return {}
    return {name: medium.maps[reward] for name, medium in media.items() if reward in medium.maps}


def collect_scores(job: PairingJob, row: int) -> dict[str, float]:
    """Return the finite scores of a row by dimension, with the total if the rule compares it."""
    values = job.table.scores[row]
    named = zip(job.table.dims, values.tolist(), strict=True)
    found = {dim: value for dim, value in named if value == value}
    if job.rule.needs_all and job.rule.decides not in found:
        found[job.rule.decides] = job.total[row].item()
    return found


def check_folder(folder: Path) -> None:
    """Raise ValueError if a folder holds other files, or cannot be one.

    Earlier pairs in it will be replaced.
    """
    check_folder_path(folder)
    others = sorted(p.name for p in folder.glob("*") if p.name not in FILES)
    if others:
        raise ValueError(f"{folder} holds {others[0]!r}, which `flowalign pairs` did not write")


SHOWN = 24
"""Largest number of pairs on the page."""


def render_pairs(
    name: str,
    job: PairingJob,
    found: PairSelection,
    shown: Sequence[PairChoice],
    summary: Mapping[str, Any],
) -> str:
    """Return the self-contained page, with a histogram of the gaps of every deciding dimension."""
    gaps: dict[str, list[float]] = {}
    for choice in found.choices:
        gaps.setdefault(choice.dimension, []).append(choice.gap)
    return render(
        "pairs.html.j2",
        name=name,
        summary=summary,
        pairs=[_describe_example(job, choice) for choice in shown[:SHOWN]],
        gaps=[histogram(dim, "gap", "pairs", values) for dim, values in gaps.items()],
        dropped=[("media", found.media.summary()), ("pairs", found.pairs.summary())],
    )


def _describe_example(job: PairingJob, choice: PairChoice) -> dict[str, Any]:
    """Return the template's values of a pair: prompt, gap, and both sides with scores."""
    sides = [
        {
            "title": title,
            "picture": make_thumbnail(Media(job.table.media[row].path)),
            "scores": {dim: f"{value:.4g}" for dim, value in collect_scores(job, row).items()},
        }
        for title, row in (("chosen", choice.winner), ("rejected", choice.loser))
    ]
    prompt = job.table.media[choice.winner].prompt
    stage = f", stage {choice.stage}" if job.stages else ""
    return {
        "prompt": prompt,
        "gap": f"{choice.dimension} gap {choice.gap:.4g}{stage}",
        "sides": sides,
    }


def make_thumbnail(medium: Media) -> str:
    """Return a thumbnail as a data URL, animated for a video; "" if the file cannot be decoded."""
    try:
        return data_address("webp", read_thumbnail(medium))
    except MediaProblem:  # validation has read the header only
        return ""
