"""Merge the votes of all annotators into one score per candidate."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from flowalign.curation.votes.vote_table import VoteTable
from flowalign.data.readers.fields import REQUEST_MASK
from flowalign.data.readers.stream_rows import Row
from flowalign.functional.pairing import beaten_share


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
