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
from typing import Any, ClassVar, Literal

import torch
import yaml
from safetensors.torch import save_file

from flowalign.data.preference.validate import DropReport
from flowalign.data.readers import Dataset, open_dataset
from flowalign.data.tensor_store import save_latent
from flowalign.extra.clip_pairs.denoiser import ClipRegenerator, Clips
from flowalign.extra.clip_pairs.generators import ClipPair, PairGenerator
from flowalign.rewards.composite import Rewards
from flowalign.rewards.config import WeightedReward, join_weights
from flowalign.types import Policy, Request
from flowalign.utils.files import atomic_write, read_object, write_text
from flowalign.utils.media.decode import decode
from flowalign.utils.media.encode import write_clip
from flowalign.utils.media.media import Media, MediaProblem
from flowalign.utils.ranges import Decay, DenoisingSteps, PositiveInt, Seed, require_ranges
from flowalign.utils.seeds import is_in_share


@dataclass(frozen=True, kw_only=True)
class ClipPairs:
    """Run file of the generation of pairs; one YAML file sets all fields."""

    flat_lists: ClassVar = {"rewards": ("model", "weight")}
    """Fields of a reward, see `flowalign.utils.typed_settings`."""
    policy: Policy
    """Policy that noises and denoises the videos: the one that will be trained."""
    clips: str
    """Path of a dataset in any format of `flowalign score`: a folder with captions, or a table."""
    method: PairGenerator
    """Pair generator, by dotted path: `flowalign.extra.DensePairs`, `flowalign.extra.LocalPairs` or
    your own class."""
    schema: str = "auto"
    root: str | None = None
    """Folder where relative paths begin. Null: the folder of the file."""
    columns: dict[str, str | list[str]] | None = None
    """Columns of the dataset by their names in flowalign, such as `prompt: caption`. Null: as they
    are."""
    limit: PositiveInt | None = None
    """Number of records to read, from the first one. Null: all."""
    num_frames: PositiveInt | None = None
    """Frames read per video at the policy's fps; shorter videos are dropped. Null: the policy's
    number. Needed for policies without a fixed number of frames."""
    rewards: list[WeightedReward] = field(default_factory=list)
    """Reward models, each with its `weight`; methods compare the weighted sum."""
    num_steps: DenoisingSteps = 40
    """Steps of the sampler from pure noise; a video uses the steps below its noise level."""
    batch_size: PositiveInt = 4
    """Number of videos that are processed and written together."""
    micro_batch: PositiveInt = 4
    """Number of videos per network call and decode."""
    held_out: Decay = 0.1
    """Share of the prompts that are held out with their pairs, in [0, 1)."""
    max_dropped_fraction: Decay = 0.05
    """Largest share of unusable videos, in [0, 1]; above it, the command fails at the end."""
    seed: Seed = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: PositiveInt | None = None
    """CPU threads. Null: torch's choice."""
    output_dir: str = "runs/clip_pairs"

    def __post_init__(self) -> None:
        """Check everything that needs neither weights nor videos."""
        require_ranges(self)
        if self.num_steps < 2:
            raise ValueError(f"num_steps is {self.num_steps}; it must be at least 2")
        self._check_policy()
        rewards = self._build_rewards()
        rewards.check_policy(self.policy)
        self.method.check(rewards)

    def _check_policy(self) -> None:
        self.policy.check_stored_media("clips")
        if self.policy.fps is None:
            raise ValueError(
                f"the policy {type(self.policy).__name__} makes images; clip pairs need videos"
            )
        if self.policy.num_frames and self.num_frames not in (None, self.policy.num_frames):
            raise ValueError(
                f"num_frames is {self.num_frames}, but the policy makes {self.policy.num_frames} "
                "frames: remove num_frames, or change the policy's"
            )

    def _build_rewards(self) -> Rewards:
        return Rewards([one.model for one in self.rewards], join_weights(self.rewards))

    def dataset(self) -> Dataset:
        """Open the dataset of videos; raise ValueError if there is none."""
        return open_dataset(self.clips, self.schema, self.root, self.columns)

    def regenerator(self, device: torch.device) -> ClipRegenerator:
        """Load the policy and the rewards; raise ValueError if they cannot be used."""
        if self.threads:
            torch.set_num_threads(self.threads)
        rewards = self._build_rewards()
        rewards.load()
        rewards.check_policy(self.policy)  # a reward server reports its dimensions only now
        self.policy.load(device)
        rewards.costs.count(self.policy.denoiser)
        return ClipRegenerator(self.policy, rewards, self.num_steps, self.seed, self.micro_batch)


_CHANGES_NOTHING = ("output_dir", "device", "threads", "held_out", "max_dropped_fraction")


def settings_of(text: str, dataset: Dataset) -> dict[str, Any]:
    """Return the settings of a resolved run file that decide the pairs, for the manifest."""
    settings = yaml.safe_load(text)
    kept = {name: value for name, value in settings.items() if name not in _CHANGES_NOTHING}
    return kept | {"identity": dataset.identity()}


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
    faults: list[Drop] = field(default_factory=list)
    """Videos that could not be used."""
    expected: list[Drop] = field(default_factory=list)
    """Videos with pairs that the method drops by design."""
    costs: dict[str, float] = field(default_factory=dict)
    """Network evaluations, decodes, reward calls and seconds."""
    stamps: list[str] = field(default_factory=list)
    """Stamps of the videos of the batch."""

    @staticmethod
    def join(parts: Sequence["BatchOutcome"]) -> "BatchOutcome":
        """Return the joined outcomes of all parts."""
        return BatchOutcome(
            [row for part in parts for row in part.rows],
            [drop for part in parts for drop in part.faults],
            [drop for part in parts for drop in part.expected],
            {name: sum(part.costs[name] for part in parts) for name in parts[0].costs},
        )

    def drop_report(self) -> DropReport:
        """Return the number of dropped videos by kind of problem."""
        report = DropReport()
        for problem, where in (*self.faults, *self.expected):
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
            outcome = _make_pairs(cfg, regenerator, folder, batch)
            write_text(_part_file(folder, number), json.dumps(asdict(outcome)))
            watch(batch[-1].number + 1)
    return number + 1


def finish(cfg: ClipPairs, num_batches: int) -> BatchOutcome | None:
    """Write the lists and the summary if all parts exist; return None if a shard is not done."""
    folder = Path(cfg.output_dir)
    parts = [_part_file(folder, number) for number in range(num_batches)]
    if not all(part.exists() for part in parts):
        return None
    found = BatchOutcome.join([BatchOutcome(**read_object(part)) for part in parts])
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
        "faults": len(found.faults),
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
            found.faults.append((str(error), source.where))
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
            drops = found.expected if result.expected else found.faults
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
    return part.exists() and read_object(part).get("stamps") == stamps


def _part_file(folder: Path, number: int) -> Path:
    return folder / "parts" / f"{number:06d}.json"
