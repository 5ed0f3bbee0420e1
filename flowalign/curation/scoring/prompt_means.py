"""Average the scores of each prompt, as reference columns of a prompt file."""

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from flowalign.curation.scoring.part_files import REFERENCES, Row
from flowalign.utils.files import write_text

FILE = "prompts.jsonl"


def average_prompts(rows: Iterable[Row], prefix: str) -> list[dict[str, Any]]:
    """Return a row for each prompt, with the mean of its valid scores in each dimension.

    The column of a dimension is its name after `prefix`. A dimension without a valid score has no
    column. Prompts keep the order of their first samples.

    Raises:
        ValueError: A sample has no prompt, or references, which a prompt alone does not identify.
    """
    scores: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if not row["prompt"] or row.get(REFERENCES):
            raise ValueError(
                f"record {row['record']} has {'references' if row['prompt'] else 'no prompt'}; "
                "--summarize averages samples of one prompt without references"
            )
        found = scores.setdefault(row["prompt"], {})
        for dim in (name.removesuffix("_valid") for name in row if name.endswith("_valid")):
            if row[dim] is not None:
                found.setdefault(prefix + dim, []).append(row[dim])
    return [
        {"prompt": prompt, **{name: fmean(values) for name, values in found.items()}}
        for prompt, found in scores.items()
    ]


def write_prompts(folder: Path, rows: Iterable[Row], prefix: str) -> Path:
    """Write the averages of `average_prompts` to `prompts.jsonl`, and return its path."""
    means = average_prompts(rows, prefix)
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in means]
    write_text(folder / FILE, "".join(lines))
    return folder / FILE
