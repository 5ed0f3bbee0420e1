"""Make a folder of training pairs from a dataset of videos.

    train.jsonl, held_out.jsonl   rows in the format of the method's data reader
    latents/  clips/  masks/      both sides of every pair, for training and for viewing
    parts/                        outcome of each batch of videos; done unless a video changes
    clip_pairs.json               settings that decide the pairs
    summary.json                  numbers of pairs and drops, and costs

Files are written atomically, and a batch is made as a whole. So an interrupted and repeated job
gives the same bits.
"""

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from flowalign.data.media.decode import decode
from flowalign.data.media.encode import write_clip
from flowalign.data.media.media import Media, MediaProblem
from flowalign.data.preference.validate import DropReport
from flowalign.data.readers import Dataset
from flowalign.data.tensor_store import save_latent
from flowalign.extra.clip_pairs.denoiser import ClipRegenerator, Clips
from flowalign.extra.clip_pairs.generators import ClipPair
from flowalign.extra.clip_pairs.run_file import ClipPairs
from flowalign.types import Request
from flowalign.utils.files import atomic_write, read_object, write_text
from flowalign.utils.seeds import is_in_share

TRAIN, HELD_OUT, SUMMARY = "train.jsonl", "held_out.jsonl", "summary.json"
MANIFEST = "clip_pairs.json"
FOLDERS = ("latents", "clips", "masks", "parts")
Drop = Sequence[str]
"""Problem of a video without a pair, and its location in the dataset."""


@dataclass(frozen=True)
class SourceClip:
    """Real video of the dataset, with its prompt and location."""

    number: int
    where: str
    request: Request
    medium: Media | None
    problem: str = ""
    stamp: str = ""
    """Hash that changes with the record of the dataset and its files."""


@dataclass
class BatchOutcome:
    """Pairs made from a batch of videos, videos without a pair, and costs."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    errors: list[Drop] = field(default_factory=list)
    """Videos that could not be used; named `faults` in the files of `parts`."""
    expected: list[Drop] = field(default_factory=list)
    """Videos with pairs that the method drops by design."""
    costs: dict[str, float] = field(default_factory=dict)
    """Network evaluations, decodes, reward calls and seconds."""
    stamps: list[str] = field(default_factory=list)
    """Stamps of the videos of the batch."""

    @staticmethod
    def join(parts: Sequence["BatchOutcome"]) -> "BatchOutcome":
        """Return the joined outcomes of all parts."""
        costs = {name: sum(part.costs[name] for part in parts) for name in parts[0].costs}
        return BatchOutcome(
            [row for part in parts for row in part.rows],
            [drop for part in parts for drop in part.errors],
            [drop for part in parts for drop in part.expected],
            costs,
        )

    def save(self, path: Path) -> None:
        """Write the outcome as JSON."""
        fields = {"rows": self.rows, "faults": self.errors, "expected": self.expected}
        write_text(path, json.dumps(fields | {"costs": self.costs, "stamps": self.stamps}))

    @staticmethod
    def read(path: Path) -> "BatchOutcome":
        """Read an outcome written by `save`."""
        fields: Any = read_object(path)
        names = "rows", "faults", "expected", "costs", "stamps"
        return BatchOutcome(*(fields.get(name) for name in names))

    def drop_report(self) -> DropReport:
        """Return the number of dropped videos by kind of problem."""
        report = DropReport()
        for problem, where in (*self.errors, *self.expected):
            report.add(problem, where)
        return report


def run(
    cfg: ClipPairs,
    dataset: Dataset,
    shard: tuple[int, int],
    join: Callable[[], torch.device],
    watch: Callable[[int], None],
) -> int:
    """Make the missing batches of this shard; return the number of batches of the dataset.

    Weights are loaded only if a batch is missing, onto the device that `join` returns. `watch` is
    called with the number of videos done.
    """
    folder, regenerator, number = Path(cfg.output_dir), None, -1
    for name in FOLDERS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for number, batch in enumerate(
        _split_batches(iterate_sources(dataset, cfg.limit), cfg.batch_size)
    ):
        if number % shard[1] == shard[0] and not _is_made(_part_file(folder, number), batch):
            regenerator = regenerator or cfg.regenerator(join())
            _make_pairs(cfg, regenerator, folder, batch).save(_part_file(folder, number))
            watch(batch[-1].number + 1)
    return number + 1


def finish(cfg: ClipPairs, num_batches: int) -> BatchOutcome | None:
    """Write the lists and the summary if all parts exist; return None if a shard is not done."""
    folder = Path(cfg.output_dir)
    parts = [_part_file(folder, number) for number in range(num_batches)]
    if not all(part.exists() for part in parts):
        return None
    found = BatchOutcome.join([BatchOutcome.read(part) for part in parts])
    train, held_out = [], []
    for row in found.rows:
        held = is_in_share(row["prompt"], cfg.held_out, cfg.seed)
        (held_out if held else train).append(row)
    for name, rows in ((TRAIN, train), (HELD_OUT, held_out)):
        if rows:
            write_text(folder / name, "".join(json.dumps(row) + "\n" for row in rows))
        else:
            (folder / name).unlink(missing_ok=True)
    summary = {
        "pairs": len(found.rows),
        "train": len(train),
        "held_out": len(held_out),
        "faults": len(found.errors),
        "dropped": found.drop_report().summary(),
        "costs": found.costs,
    }
    write_text(folder / SUMMARY, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    return found


def iterate_sources(dataset: Dataset, limit: int | None) -> Iterator[SourceClip]:
    """Yield every video of every record; a record without any gives a source with a problem."""
    number = itertools.count()
    for where, record in itertools.islice(dataset.iter_located(), limit):
        problem = record.problem or ("" if record.prompt else "no prompt")
        request, stamp = Request(record.prompt), record.stamp()
        try:
            request = record.request()
        except MediaProblem as error:
            problem = problem or str(error)
        for medium in record.media or [None]:
            yield SourceClip(next(number), where, request, medium, problem, stamp)


def _split_batches(items: Iterator[SourceClip], size: int) -> Iterator[list[SourceClip]]:
    while batch := list(itertools.islice(items, size)):
        yield batch


def _make_pairs(
    cfg: ClipPairs, regenerator: ClipRegenerator, folder: Path, batch: Sequence[SourceClip]
) -> BatchOutcome:
    """Make the pairs of a batch, and write their files."""
    start, before = time.perf_counter(), asdict(regenerator.rewards.costs)
    found = BatchOutcome(stamps=[source.stamp for source in batch])
    latents: dict[SourceClip, torch.Tensor] = {}
    for source in batch:
        try:
            latents[source] = _embed_source(regenerator, cfg, source)
        except (OSError, ValueError) as error:
            found.errors.append((str(error), source.where))
    results = []
    if latents:
        used = list(latents)
        clips = Clips(
            torch.cat([*latents.values()]), [s.request for s in used], [s.number for s in used]
        )
        results = cfg.method.make(regenerator, clips)
    for source, result in zip(latents, results, strict=True):
        if isinstance(result, ClipPair):
            found.rows.append(_write_pair(regenerator, folder, source, result))
        else:
            drops = found.expected if result.expected else found.errors
            drops.append((result.problem, source.where))
    spent = asdict(regenerator.rewards.costs)
    found.costs = {name: float(spent[name] - before[name]) for name in spent}
    found.costs["seconds"] = time.perf_counter() - start
    return found


def _embed_source(regenerator: ClipRegenerator, cfg: ClipPairs, source: SourceClip) -> torch.Tensor:
    """Encode one video at the policy's frame rate.

    Raises:
        ValueError, OSError: The video cannot be read or encoded, or the policy rejects its request.
    """
    if source.problem or source.medium is None:
        raise MediaProblem(source.problem or "no video")
    policy = regenerator.policy
    if misfit := policy.input_spec.misfit(source.request):
        raise ValueError(f"request that the policy does not take: {type(policy).__name__} {misfit}")
    num_frames = cfg.num_frames or policy.num_frames
    clip = decode(source.medium, fps=policy.fps, num_frames=num_frames)
    latent = policy.embed(clip.frames[None])
    if not latent.isfinite().all():
        raise MediaProblem("its latent is not finite")
    return latent.float()


def _write_pair(
    regenerator: ClipRegenerator, folder: Path, source: SourceClip, pair: ClipPair
) -> dict[str, Any]:
    """Write the files of a pair; return its row."""
    fps, stem = regenerator.policy.fps, f"{source.number:06d}"
    assert fps is not None, "the run file was checked for a video policy"
    row: dict[str, Any] = {"id": stem, "prompt": source.request.prompt}
    for name, side in pair.sides.items():
        latent, seen = f"latents/{stem}-{name}.safetensors", f"clips/{stem}-{name}.mp4"
        save_latent(folder / latent, side.latent, regenerator.encoder)
        write_clip(folder / seen, side.media, fps)
        row |= {name: latent, f"{name}_video": seen}
    if pair.mask is not None:
        row["mask"] = f"masks/{stem}.safetensors"
        with atomic_write(folder / row["mask"]) as partial:
            save_file({"mask": pair.mask.cpu().contiguous()}, partial)
    path = source.medium.path if source.medium else None
    return row | {"fps": fps, "source": path, **pair.row}


def _is_made(part: Path, batch: Sequence[SourceClip]) -> bool:
    """Return whether the pairs of a batch exist and its videos have not changed since."""
    stamps = [source.stamp for source in batch]
    return part.exists() and BatchOutcome.read(part).stamps == stamps


def _part_file(folder: Path, number: int) -> Path:
    return folder / "parts" / f"{number:06d}.json"
