"""Score images and datasets, and make preference pairs of the scores."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flowalign.api.data import to_columns
from flowalign.api.objects import share_rewards
from flowalign.api.options import advise_in_python
from flowalign.curation.pairing_job import PairingJob, find_pairs, format_pair
from flowalign.curation.score_table import PairingRule, find_table, read_table
from flowalign.curation.scoring.part_files import join_own_columns
from flowalign.curation.scoring.scoring_job import ScoringJob, finish, run
from flowalign.curation.scoring.stats import Progress
from flowalign.curation.scoring.table_rows import check_prompts
from flowalign.data.readers import Columns, open_dataset
from flowalign.utils.folders import check_folder_path, hold_lock
from flowalign.utils.imports import import_optional
from flowalign.utils.media.decode import read_clips
from flowalign.utils.media.encode import write_clip, write_picture

_FPS = 8.0
"""Frame rate of videos that are given as lists of images."""


class Table(dict[str, list[Any]]):
    """Scores as columns: each dimension, `<dimension>_valid`, `reason`, `prompt`, `path`, ..."""

    def __init__(self, columns: Mapping[str, list[Any]], folder: Path, temporary: Any = None):
        super().__init__(columns)
        self.folder = folder
        """Folder with scores.parquet; it ends with this object unless `out` was given."""
        self._temporary = temporary

    def to_pandas(self) -> Any:
        """Return the columns as a DataFrame of pandas."""
        return import_optional("pandas", "data").DataFrame(dict(self))

    def to_dataset(self) -> Any:
        """Return the columns as a `datasets.Dataset`."""
        return import_optional("datasets", "data").Dataset.from_dict(dict(self))


class Pairs(list[dict[str, Any]]):
    """Preference pairs as rows with `prompt`, `chosen` and `rejected`, as TRL names them."""

    def __init__(self, rows: Sequence[dict[str, Any]], table: Table):
        super().__init__(rows)
        self.table = table
        """Scores of the pairs, which may own the folder with the images."""


@advise_in_python()
def score(
    data: Any,
    rewards: Any,
    prompts: Sequence[str] | str | None = None,
    *,
    columns: Columns | None = None,
    out: str | Path | None = None,
    batch_size: int = 32,
    limit: int | None = None,
    max_failed_fraction: float = 0.05,
) -> Table:
    """Score images or videos, and return a table.

    Args:
        data: List of PIL images, paths or tensors; or a dataset: a folder, a table, a name such as
            `hub:OWNER/NAME:SPLIT`, a `datasets.Dataset`, a list of rows.
        rewards: Functions and reward models, as in `align`.
        prompts: Prompt of each image, for lists of images.
        columns: Columns of the dataset by their names in flowalign: `{"prompt": "caption"}`.
        out: Folder of the results. An unfinished job in it is continued. None: a temporary folder.
        batch_size: Number of images per call of a reward.
        limit: Number of rows to score. None: all.
        max_failed_fraction: Share of failed rows above which an error is raised.

    Raises:
        ValueError: The data or an argument are invalid.
        TooManyFailures: Too many rows failed.
    """
    temporary = TemporaryDirectory()
    folder = Path(out or temporary.name)
    check_folder_path(folder, "out")
    folder.mkdir(parents=True, exist_ok=True)
    source = _write_media(data, prompts, folder) if _is_media(data) else data
    dataset = open_dataset(source, columns=columns)
    models = list(share_rewards(rewards).values())
    share = max_failed_fraction
    if not models:
        raise ValueError("rewards is empty: give at least one function or reward model")
    check_prompts(dataset, models)
    job = ScoringJob(dataset, models, folder, batch_size, limit=limit, max_failed_fraction=share)
    with hold_lock(folder / "parts" / ".lock-0-of-1"):
        blocks = run(job, Progress())
        finish(job, blocks, "parquet").check(share)
    return Table(to_columns([*map(join_own_columns, job.parts.rows(blocks))]), folder, temporary)


@advise_in_python()
def make_pairs(
    table: Table | str | Path,
    rule: str = "best_worst",
    *,
    dimensions: Sequence[str] = (),
    weights: Mapping[str, float] | None = None,
    min_gap: float = 0.0,
    max_per_prompt: int | None = None,
) -> Pairs:
    """Choose preference pairs among the images of each prompt.

    Args:
        table: Result of `score`, or a folder or table of `flowalign score`.
        rule: best_worst, gap, dominance or per_dimension, as in `flowalign pairs`.
        dimensions: Dimensions that count, or columns of annotators such as `votes/overall`. Empty:
            all dimensions.
        weights: Weight of each dimension in the total (default: 1).
        min_gap: Smallest lead of a winner.
        max_per_prompt: Largest number of pairs per prompt. None: all.

    Raises:
        ValueError: The table has no such dimension, or it gives no pair.
    """
    file = find_table(table.folder if isinstance(table, Table) else Path(table))
    scored = read_table(file, list(dimensions))
    chosen = dict.fromkeys(scored.dims, 1.0) | dict(weights or {})
    if unknown := sorted(chosen.keys() - set(scored.dims)):
        there = ", ".join(scored.dims)
        raise ValueError(f"weights names {unknown[0]}, which is not compared; there are {there}")
    chosen_rule = PairingRule(rule, chosen, min_gap=min_gap, max_per_prompt=max_per_prompt)
    job = PairingJob(scored, chosen_rule, chosen_rule.compares_labels)
    found = find_pairs(job)
    if not found.choices:
        reasons = [*found.media.lines(), *found.pairs.lines()][:3] or ["no gap is large enough"]
        raise ValueError("\n".join([f"{file} gives no pair:", *(line[:200] for line in reasons)]))
    own = table if isinstance(table, Table) else Table({}, file.parent)
    return Pairs([format_pair(job, choice) for choice in found.choices], own)


def _is_media(data: Any) -> bool:
    """Return whether data are images or videos themselves instead of rows."""
    return isinstance(data, list | tuple) and bool(data) and not isinstance(data[0], Mapping)


def _write_media(data: Any, prompts: Sequence[str] | str | None, folder: Path) -> list[Any]:
    """Return rows with a path for each image; images in memory are written below `folder`."""
    texts = [prompts or ""] * len(data) if prompts is None or isinstance(prompts, str) else prompts
    if len(texts) != len(data):
        raise ValueError(f"prompts has {len(texts)} entries for {len(data)} images")
    rows = []
    for i, (one, prompt) in enumerate(zip(data, texts, strict=True)):
        path = Path(one) if isinstance(one, str | Path) else _write(one, folder / "media", i)
        rows.append({"id": str(i), "path": str(path.absolute()), "prompt": prompt})
    return rows


def _write(medium: Any, folder: Path, i: int) -> Path:
    """Write an image, or a video that is a list of images, and return its path."""
    (clip,) = read_clips([medium])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{i:06}{'.png' if len(clip) == 1 else '.webm'}"
    if len(clip) == 1:
        write_picture(path, clip[0])
    else:
        write_clip(path, clip, _FPS)
    return path
