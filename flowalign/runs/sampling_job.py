"""Sample a run file's model to a grid, or to a folder that can be scored.

A folder holds `metadata.jsonl` and one file per prompt and copy: a PNG file, or an MP4 file from a
video model, with sound if the model makes it. The initial noise is a function of the seed and of
the indices of prompt and copy. Files are written atomically. After a kill, the same command
continues and makes the same files.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from flowalign.data.readers.schema import REQUEST_MASK
from flowalign.runs.config import Run
from flowalign.runs.steering import Steering
from flowalign.sampling.inference import generate
from flowalign.training import checkpoint
from flowalign.types import Request, Sound
from flowalign.utils.console import Progress
from flowalign.utils.files import digest_file, write_text
from flowalign.utils.folders import record_settings
from flowalign.utils.media.encode import (
    CLIPS,
    PICTURE_FILES,
    fit_into,
    write_clip,
    write_grid,
    write_picture,
)
from flowalign.utils.seeds import generator

MANIFEST, LISTING = "sample.json", "metadata.jsonl"
DECODED_AT_ONCE = 16
"""Number of images decoded in one call; videos are decoded one by one."""


@dataclass(frozen=True)
class SamplingJob:
    """Run file, requests and settings of a sampling command."""

    run: Run
    """Run file of the sampled model."""
    settings: Mapping[str, Any]
    """Settings that determine every image or video, for the manifest."""
    requests: Sequence[Request]
    """Requests to sample."""
    count: int
    """Number of images or videos per request."""
    num_steps: int
    """Number of denoising steps."""
    seed: int
    """Seed of the initial noise."""
    weights: str | None
    """Folder with trained weights. None: the policy's own weights."""
    out: Path
    """File of a grid, or folder."""
    micro_batch: int
    """Number of images or videos per network call."""
    steering: Steering | None = None
    """Optimisation or search of latents that replaces plain sampling. None: plain sampling."""

    def load(self) -> None:
        """Load the weights of the model."""
        self.run.load_policy(self.run.join())
        if self.weights:
            self.run.policy.load_weights(self.weights)
        if self.steering:
            self.steering.load(self.run.policy)

    @property
    def fps(self) -> float | None:
        """Return the frames per second of the videos; None for images."""
        return self.run.policy.fps

    def media(self, requests: Sequence[Request], generators: Sequence[torch.Generator]) -> Tensor:
        """Return sampled images or videos, [n, F, 3, H, W] in [0, 1], on the CPU."""
        return self.decoded(self.latents(requests, generators))

    def latents(self, requests: Sequence[Request], generators: Sequence[torch.Generator]) -> Tensor:
        """Return sampled clean latents."""
        policy, steps, size = self.run.policy, self.num_steps, self.micro_batch
        if not self.steering:
            guidance = self.run.evaluation.reward_guidance if self.run.evaluation else None
            given = requests, steps, generators, size, guidance, self.run.conditioning
            return generate(policy, *given)
        if self.run.conditioning:
            requests = [self.run.conditioning.for_inference(request) for request in requests]
        return self.steering.sample(policy, self.decoded, requests, steps, generators, size)

    @property
    def planned(self) -> str:
        """Return the planned cost of all samples; empty without a search."""
        count = len(self.requests) * self.count
        return self.steering.plan(self.run.policy, self.num_steps, count) if self.steering else ""

    def spent(self, count: int) -> str:
        """Return the cost of `count` samples, after a semicolon; empty without a search."""
        if not self.steering or not count:
            return ""
        return self.steering.check_spent(self.run.policy, self.num_steps, count)

    def decoded(self, latents: Tensor) -> Tensor:
        """Decode latents to images or videos on the CPU."""
        at_once = 1 if self.fps else DECODED_AT_ONCE
        return torch.cat([self.run.policy.decode(x).cpu() for x in latents.split(at_once)])

    def sound(self, latents: Tensor) -> list[Sound] | list[None]:
        """Decode the sound of each video; None for models without sound."""
        decoder = self.run.policy.sound_decoder
        return decoder.decode_sound(latents) if decoder else [None] * len(latents)


def hash_weights(folder: Path) -> str:
    """Return a hash of trained weights, without `state`, which does not change the samples.

    Raises:
        ValueError: The folder does not exist, or belongs to a checkpoint that is damaged.
    """
    checkpoint.require_weights(folder)
    checkpoint.check_weights(folder)
    found = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder)
        if name.parts[0] != "state":
            found.update(json.dumps([name.as_posix(), digest_file(path)]).encode())
    return found.hexdigest()[:16]


def usual_sampler(run: Run) -> tuple[int, int]:
    """Return denoising steps and batch size of a run's evaluation, else of its training.

    The number of steps is 0 if neither samples.
    """
    cfg = run.evaluation
    if cfg:
        return cfg.num_steps, cfg.micro_batch
    return run.recipe.sampler or (0, DECODED_AT_ONCE)


def is_file_name(out: str, clips: bool) -> bool:
    """Return whether `out` names a file for a grid, instead of a folder.

    Raises:
        ValueError: Images or videos cannot be written to a file of this type.
    """
    path = Path(out)
    if out.endswith("/") or path.is_dir():
        return False
    if path.exists() and not path.suffix:
        raise ValueError(f"--out {out} is a file; name a folder, or a file such as grid.png")
    if not path.suffix[1:2].isalpha():  # "samples" and "sd3.5" are folders
        return False
    known = tuple(dict.fromkeys((*PICTURE_FILES, *CLIPS))) if clips else PICTURE_FILES
    if path.suffix.lower() not in known:
        raise ValueError(
            f"--out {out}: {'videos' if clips else 'images'} can be written to "
            f"{', '.join(known)};\nfor a folder with a dot in its name, write {out}/"
        )
    return True


def write_as_grid(job: SamplingJob) -> str:
    """Write one grid with a row per prompt: an image, or for videos a moving grid or film strips.

    In editing tasks, each row begins with the source image. A single image is written without a
    frame.
    """
    job.load()
    requests = [request for request in job.requests for _ in range(job.count)]
    seeds = [generator(job.seed, "sample", i) for i in range(len(requests))]
    media = job.media(requests, seeds)
    if len(media) == 1 and not job.fps:
        job.out.parent.mkdir(parents=True, exist_ok=True)
        write_picture(job.out, media[0, 0])
        return f"1 image: {job.out}{job.spent(1)}"
    if job.fps or not all(request.references for request in job.requests):
        what = write_grid(job.out, media, job.count, job.fps)
        return f"{what}: {job.out}{job.spent(len(requests))}"
    write_grid(job.out, _add_sources(job, media), job.count + 1, None)
    written = f"{len(media)} images and their {len(job.requests)} sources: {job.out}"
    return f"{written}{job.spent(len(requests))}"


def _add_sources(job: SamplingJob, media: Tensor) -> Tensor:
    """Return media [n, 1, 3, H, W] with the source of each request before its samples."""
    sources = [r.references[0].read()[0] for r in job.requests]
    size = media.shape[-2], media.shape[-1]
    shown = torch.stack([fit_into(source, *size) for source in sources])[:, None, None]
    return torch.cat([shown, media.unflatten(0, (-1, job.count))], 1).flatten(0, 1)


@dataclass(frozen=True)
class Medium:
    """One file of an output folder."""

    request: Request
    """Request of this sample."""
    number: int
    """Index of the request, from 0."""
    copy: int
    """Index of the copy of this request, from 0."""
    fps: float | None = None
    """Frames per second of a video. None for an image."""

    @property
    def id(self) -> str:
        """Return the indices of request and copy, since a prompt may hold any character."""
        return f"{self.number:06d}-{self.copy:02d}"

    @property
    def file_name(self) -> str:
        """Return the name of the file within the folder."""
        return f"{self.id}.{'mp4' if self.fps else 'png'}"


def write_folder(job: SamplingJob) -> str:
    """Write one file per request and copy.

    Batches are always sampled whole, so a resumed folder gets the same files.
    """
    out, size = job.out, job.micro_batch
    media = [
        Medium(request, number, copy, job.fps)
        for number, request in enumerate(job.requests)
        for copy in range(job.count)
    ]
    out.mkdir(parents=True, exist_ok=True)
    record_settings(out / MANIFEST, job.settings, "`flowalign sample`")
    batches = [media[k : k + size] for k in range(0, len(media), size)]
    todo = [batch for batch in batches if _find_absent(out, batch)]
    _write_listing(out, media, job.seed)
    if todo:
        job.load()
    start, made, drawn = time.perf_counter(), 0, 0
    with Progress(len(todo), console=Console(stderr=True)) as progress:
        for step, batch in enumerate(todo):
            made += _draw(job, batch)
            drawn += len(batch)
            progress.update(step, {"throughput": made / (time.perf_counter() - start)})
    rate = made / (time.perf_counter() - start)
    _write_listing(out, media, job.seed)
    what = "videos" if job.fps else "images"
    told = f"{len(media)} {what}, {made} of them new, {rate:.1f} {what}/s: {out}"
    return f"{told}{job.spent(drawn)}"


def _draw(job: SamplingJob, batch: Sequence[Medium]) -> int:
    """Sample a batch, write the missing files, and return their number."""
    seeds = [generator(job.seed, "sample", one.number, one.copy) for one in batch]
    latents = job.latents([one.request for one in batch], seeds)
    absent, media, sound = _find_absent(job.out, batch), job.decoded(latents), job.sound(latents)
    for one, frames, heard in zip(batch, media, sound, strict=True):
        if one in absent and one.fps:
            write_clip(job.out / one.file_name, frames, one.fps, heard)
        elif one in absent:
            write_picture(job.out / one.file_name, frames[0], alone=True)
    with (job.out / LISTING).open("a", encoding="utf-8") as listing:
        listing.writelines(_format_rows(absent, job.seed))
    return len(absent)


def _find_absent(out: Path, batch: Sequence[Medium]) -> list[Medium]:
    return [one for one in batch if not (out / one.file_name).exists()]


def _write_listing(out: Path, media: Sequence[Medium], seed: int) -> None:
    """List the existing files in order, in a format that `flowalign score` and training read.

    A row also has the metadata of its request, for rewards that read it. The fields of this module
    override metadata of the same name.
    """
    absent = set(_find_absent(out, media))
    existing = [one for one in media if one not in absent]
    write_text(out / LISTING, "".join(_format_rows(existing, seed)))


def _format_rows(media: Sequence[Medium], seed: int) -> Iterator[str]:
    for one in media:
        row = {"id": one.id, "file_name": one.file_name, "prompt": one.request.prompt, "seed": seed}
        row |= {"copy": one.copy} | ({"fps": one.fps} if one.fps else {})
        if one.request.references:
            row["references"] = [os.path.abspath(each.name) for each in one.request.references]
        if one.request.mask:
            row[REQUEST_MASK] = os.path.abspath(one.request.mask.name)
        yield json.dumps({**one.request.metadata, **row}) + "\n"
