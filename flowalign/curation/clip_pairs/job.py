"""From a dataset of clips to a folder of pairs that training reads.

    train.jsonl, held_out.jsonl   rows as the reader of the method's data takes them
    latents/  clips/  masks/      both sides of every pair, as trained on and as seen
    parts/                        what became of each batch of clips; one that is there is done
    clip_pairs.json               what decided all this
    summary.json                  pairs, what was dropped and why, costs

Files are written aside and renamed; a batch is made whole: where a kill fell changes no bit.
"""

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from flowalign.curation.clip_pairs.denoiser import Clips, Workshop
from flowalign.curation.clip_pairs.method import Made
from flowalign.curation.clip_pairs.run import ClipPairs
from flowalign.data.latents.latent_files import save_latent
from flowalign.data.preference.dropped import Tally
from flowalign.data.readers import Dataset
from flowalign.media.decode import MediaProblem, decode
from flowalign.media.encode import write_clip
from flowalign.media.media import Media
from flowalign.utils.files import aside, write_text

TRAIN, HELD_OUT, SUMMARY = "train.jsonl", "held_out.jsonl", "summary.json"
MANIFEST = "clip_pairs.json"
FOLDERS = ("latents", "clips", "masks", "parts")
Drop = Sequence[str]
"""Why a clip gives no pair, and where it is."""


@dataclass(frozen=True)
class Source:
    """A real clip, where it was found."""

    number: int
    where: str
    prompt: str
    medium: Media | None
    problem: str = ""


@dataclass
class Outcome:
    """What became of some clips."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    faults: list[Drop] = field(default_factory=list)
    """Clips that could not be used."""
    expected: list[Drop] = field(default_factory=list)
    """Pairs that the method leaves out by design."""
    costs: dict[str, float] = field(default_factory=dict)
    """Network evaluations, decodes, reward calls and seconds."""

    @staticmethod
    def joined(parts: Sequence["Outcome"]) -> "Outcome":
        """Of all parts together."""
        costs = {name: sum(part.costs[name] for part in parts) for name in parts[0].costs}
        return Outcome(
            [row for part in parts for row in part.rows],
            [drop for part in parts for drop in part.faults],
            [drop for part in parts for drop in part.expected], costs,
        )  # fmt: skip

    def tally(self) -> Tally:
        """What was dropped, by kind."""
        found = Tally()
        for problem, where in (*self.faults, *self.expected):
            found.add(problem, where)
        return found


def run(
    cfg: ClipPairs, dataset: Dataset, shard: tuple[int, int], watch: Callable[[int], None]
) -> int:
    """Make the missing batches of this shard; how many batches the dataset has.

    Weights are read when the first one is missing. `watch` is told how many clips are done.
    """
    folder, workshop, number = Path(cfg.output_dir), None, -1
    for name in FOLDERS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for number, batch in enumerate(_batches(sources(dataset, cfg.limit), cfg.batch_size)):
        if number % shard[1] == shard[0] and not _part(folder, number).exists():
            workshop = workshop or cfg.workshop()
            outcome = _made(cfg, workshop, folder, batch)
            write_text(_part(folder, number), json.dumps(asdict(outcome)))
            watch(batch[-1].number + 1)
    return number + 1


def finish(cfg: ClipPairs, num_batches: int) -> Outcome | None:
    """Write the lists and the summary if all parts are there; None if a shard is not done."""
    folder = Path(cfg.output_dir)
    parts = [_part(folder, number) for number in range(num_batches)]
    if not all(part.exists() for part in parts):
        return None
    found = Outcome.joined([Outcome(**json.loads(part.read_text())) for part in parts])
    train, held_out = [], []
    for row in found.rows:
        held = _is_held_out(row["prompt"], cfg.held_out, cfg.seed)
        (held_out if held else train).append(row)
    for name, rows in ((TRAIN, train), (HELD_OUT, held_out)):
        if rows:
            write_text(folder / name, "".join(json.dumps(row) + "\n" for row in rows))
        else:
            (folder / name).unlink(missing_ok=True)
    summary = {
        "pairs": len(found.rows), "train": len(train), "held_out": len(held_out),
        "faults": len(found.faults), "dropped": found.tally().summary(), "costs": found.costs,
    }  # fmt: skip
    write_text(folder / SUMMARY, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    return found


def sources(dataset: Dataset, limit: int | None) -> Iterator[Source]:
    """Every medium of every record, and a problem for every record without any."""
    number = itertools.count()
    for where, record in itertools.islice(dataset.located(), limit):
        problem = record.problem or ("" if record.prompt else "no prompt")
        for medium in record.media or [None]:
            yield Source(next(number), where, record.prompt, medium, problem)


def _batches(items: Iterator[Source], size: int) -> Iterator[list[Source]]:
    while batch := list(itertools.islice(items, size)):
        yield batch


def _made(cfg: ClipPairs, workshop: Workshop, folder: Path, batch: Sequence[Source]) -> Outcome:
    """Pairs of a batch, with their files written."""
    start, before, found = time.perf_counter(), asdict(workshop.rewards.costs), Outcome()
    latents: dict[Source, torch.Tensor] = {}
    for source in batch:
        try:
            latents[source] = _embedded(workshop, cfg, source)
        except (OSError, ValueError) as error:
            found.faults.append((str(error), source.where))
    results = []
    if latents:
        used = list(latents)
        clips = Clips(
            torch.cat([*latents.values()]), [s.prompt for s in used], [s.number for s in used]
        )
        results = cfg.method.make(workshop, clips)
    for source, result in zip(latents, results, strict=True):
        if isinstance(result, Made):
            found.rows.append(_written(workshop, folder, source, result))
        else:
            drops = found.expected if result.ordinary else found.faults
            drops.append((result.problem, source.where))
    spent = asdict(workshop.rewards.costs)
    found.costs = {name: float(spent[name] - before[name]) for name in spent}
    found.costs["seconds"] = time.perf_counter() - start
    return found


def _embedded(workshop: Workshop, cfg: ClipPairs, source: Source) -> torch.Tensor:
    """Latents of one clip, at the policy's rate.

    Raises:
        ValueError, OSError: why it has none, or that the policy does not take its prompt.
    """
    if source.problem or source.medium is None:
        raise MediaProblem(source.problem or "no medium")
    policy = workshop.policy
    try:
        policy.encode([source.prompt])  # some know only certain prompts
    except ValueError as error:
        raise ValueError(f"prompt that the policy does not take: {error}") from error
    num_frames = cfg.num_frames or policy.num_frames
    clip = decode(source.medium, fps=policy.fps, num_frames=num_frames)
    latent = policy.embed(clip.frames[None])
    if not latent.isfinite().all():
        raise MediaProblem("its latent is not finite")
    return latent.float()


def _written(workshop: Workshop, folder: Path, source: Source, made: Made) -> dict[str, Any]:
    """Write the files of a pair; its row."""
    fps, stem = workshop.policy.fps, f"{source.number:06d}"
    assert fps is not None, "a policy of pictures was let in"
    row: dict[str, Any] = {"id": stem, "prompt": source.prompt}
    for name, side in made.sides.items():
        latent, seen = f"latents/{stem}-{name}.safetensors", f"clips/{stem}-{name}.mp4"
        save_latent(folder / latent, side.latent, workshop.encoder)
        write_clip(folder / seen, side.media, fps)
        row |= {name: latent, f"{name}_video": seen}
    if made.mask is not None:
        row["mask"] = f"masks/{stem}.safetensors"
        with aside(folder / row["mask"]) as partial:
            save_file({"mask": made.mask.cpu().contiguous()}, partial)
    path = source.medium.path if source.medium else None
    return row | {"fps": fps, "source": path, **made.row}


def _part(folder: Path, number: int) -> Path:
    return folder / "parts" / f"{number:06d}.json"


def _is_held_out(prompt: str, share: float, seed: int) -> bool:
    """By a hash of prompt and seed, as `flowalign pairs` divides prompts."""
    digest = hashlib.blake2b(f"{seed} {prompt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) < share * 2**64
