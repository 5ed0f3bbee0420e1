"""Runs `flowalign sample`: samples a run file's model to a grid, or to a folder to be scored.

A folder holds `metadata.jsonl` and, for each prompt and copy, a PNG file or, from a video model, an
MP4 file, whose noise is a function of the seed and of both numbers. Files are written atomically:
after a kill the same command continues, and makes the same files.
"""

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from flowalign.cli.messages import add_config, settings_of
from flowalign.utils.console import Progress
from flowalign.utils.errors import ConfigError
from flowalign.utils.files import atomic_write, write_text
from flowalign.utils.manifest import agree

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from flowalign.runs.config import Run

HELP = "Make pictures with a run file's model, or a checkpoint of it."
EXIT_STOPPED = 130
MANIFEST, LISTING = "sample.json", "metadata.jsonl"
_DECODED_AT_ONCE = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run file, its overrides and the options of `flowalign sample`."""
    add_config(parser)
    add = parser.add_argument
    add("--weights", metavar="CHECKPOINT", help="folder with trained weights")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", action="append", help="may be repeated")
    prompts.add_argument("--prompts", metavar="FILE", help="one a line, or JSONL with `prompt`")
    add(
        "--out",
        help="a PNG file for a grid, or a folder; the same one again goes on where it was;"
        " default: samples.png, with --prompts a folder samples; a grid of clips is a film strip "
        "as PNG, and moves as .webp, .gif, .mp4 or .webm",
    )
    add("--count", type=int, default=4, help="pictures or clips per prompt, default 4")
    add("--limit", type=int, help="number of prompts, from the first one; default: all")
    add("--num_steps", type=int, help="default: as the run file evaluates, or trains")
    add("--seed", type=int, help="default: the run file's")


def run(args: argparse.Namespace) -> int:
    """Write the grid or the folder; returns 0, or 130 if interrupted.

    Raises:
        ConfigError: The options or the run file need a correction by the user.
    """
    from flowalign.media.encode import CLIPS

    log = Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print
    try:
        request = _request(args)
        log((_grid if request.out.suffix.lower() in (".png", *CLIPS) else _folder)(request))
        return 0
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except KeyboardInterrupt:
        log("stopped; the same command goes on from here")
        return EXIT_STOPPED


@dataclass(frozen=True)
class Request:
    """Holds the run file, the prompts and the settings of what is sampled."""

    run: "Run"
    settings: Mapping[str, Any]
    """Settings that decide every picture or clip, for the manifest."""
    prompts: Sequence[str]
    count: int
    """Pictures or clips per prompt."""
    num_steps: int
    """Denoising steps."""
    seed: int
    weights: str | None
    """Folder with trained weights; null: the policy's own."""
    out: Path
    micro_batch: int
    """Pictures or clips per network call."""

    def load(self) -> None:
        """Load the weights of the model."""
        import torch

        from flowalign.distributed.processes import join

        if self.run.threads:
            torch.set_num_threads(self.run.threads)
        self.run.policy.load(join(self.run.device).device)
        if self.weights:
            self.run.policy.load_weights(self.weights)

    @property
    def fps(self) -> float | None:
        """Frames per second of the clips; None for pictures."""
        return self.run.policy.fps

    def media(self, prompts: Sequence[str], generators: Sequence["torch.Generator"]) -> "Tensor":
        """Sample media, [n, F, 3, H, W] in [0, 1], on the CPU."""
        import torch

        from flowalign.sampling.rollout import generate

        policy, at_once = self.run.policy, 1 if self.fps else _DECODED_AT_ONCE
        latents = generate(policy, prompts, self.num_steps, generators, self.micro_batch)
        return torch.cat([policy.decode(x).cpu() for x in latents.split(at_once)])


def _request(args: argparse.Namespace) -> Request:
    import yaml

    from flowalign.data.prompts import read_prompts
    from flowalign.runs.config import load

    for name in ("count", "limit", "num_steps"):
        value = vars(args)[name]
        if value is not None and value < 1:
            raise ValueError(f"--{name} is {value}; it must be at least 1")
    run_file, text = load(*settings_of(args))
    prompts = args.prompt or read_prompts(args.prompts)
    num_steps, micro_batch = _usual(run_file)
    if not (num_steps := args.num_steps or num_steps):
        raise ValueError(
            f"{' '.join(args.config)} does not say how many steps to take: give --num_steps"
        )
    seed = run_file.seed if args.seed is None else args.seed
    settings = {
        "policy": yaml.safe_load(text)["policy"],
        "weights": args.weights and os.path.realpath(args.weights),
        "weights_sha256": args.weights and _content(Path(args.weights)),
        "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16],
        "num_steps": num_steps,
        "seed": seed,
    }
    out = Path(args.out or ("samples.png" if args.prompt else "samples"))
    return Request(
        run_file,
        settings,
        prompts[: args.limit],
        args.count,
        num_steps,
        seed,
        args.weights,
        out,
        micro_batch,
    )


def _content(folder: Path) -> str:
    """Hash the files of trained weights, without `state`, which does not change what is sampled.

    Raises:
        ValueError: The folder does not exist.
    """
    if not folder.is_dir():
        raise ValueError(f"--weights {str(folder)!r} is not a folder (looked in {Path.cwd()})")
    found = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder)
        if name.parts[0] != "state":
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            found.update(json.dumps([name.as_posix(), content]).encode())
    return found.hexdigest()[:16]


def _usual(run: "Run") -> tuple[int, int]:
    """Denoising steps and batch size of a run's evaluation, else of its training; else 0 steps."""
    cfg = run.evaluation
    if cfg:
        return cfg.num_steps, cfg.micro_batch
    return run.recipe.sampler or (0, _DECODED_AT_ONCE)


def _grid(request: Request) -> str:
    """Write one picture with a row per prompt; of clips a moving one, or a film strip of each."""
    from flowalign.media.image_grid import write_grid
    from flowalign.utils.seeds import generator

    if request.out.suffix.lower() != ".png" and not request.fps:
        raise ValueError(f"{request.out}: the model makes pictures, whose grid is a .png file")
    request.load()
    prompts = [prompt for prompt in request.prompts for _ in range(request.count)]
    seeds = [generator(request.seed, "sample", i) for i in range(len(prompts))]
    what = write_grid(request.out, request.media(prompts, seeds), request.count, request.fps)
    return f"{what}: {request.out}"


@dataclass(frozen=True)
class Medium:
    """Names one file of a folder."""

    prompt: str
    number: int
    """Index of the prompt, from 0."""
    copy: int
    """Index of the copy of this prompt, from 0."""
    fps: float | None = None
    """Frames per second of a clip; None for a picture."""

    @property
    def id(self) -> str:
        """Indices of prompt and copy; the prompt itself may hold any character."""
        return f"{self.number:06d}-{self.copy:02d}"

    @property
    def file_name(self) -> str:
        """Name of the file within the folder."""
        return f"{self.id}.{'mp4' if self.fps else 'png'}"


def _folder(request: Request) -> str:
    """Write a file per prompt and copy; batches are drawn whole, so a resumed folder is equal."""
    out, size = request.out, request.micro_batch
    media = [
        Medium(prompt, number, copy, request.fps)
        for number, prompt in enumerate(request.prompts)
        for copy in range(request.count)
    ]
    out.mkdir(parents=True, exist_ok=True)
    agree(out / MANIFEST, request.settings, "`flowalign sample`")
    batches = [media[k : k + size] for k in range(0, len(media), size)]
    todo = [batch for batch in batches if _absent(out, batch)]
    _list(out, media, request.seed)
    if todo:
        request.load()
    start, made = time.perf_counter(), 0
    with Progress(len(todo), console=Console(stderr=True)) as progress:
        for step, batch in enumerate(todo):
            made += _draw(request, batch)
            progress.update(step, {"throughput": made / (time.perf_counter() - start)})
    rate = made / (time.perf_counter() - start)
    _list(out, media, request.seed)
    what = "clips" if request.fps else "pictures"
    return f"{len(media)} {what}, {made} of them new, {rate:.1f} {what}/s: {out}"


def _draw(request: Request, batch: Sequence[Medium]) -> int:
    """Draw a batch, and write its absent files; returns their number."""
    from flowalign.utils.seeds import generator

    seeds = [generator(request.seed, "sample", one.number, one.copy) for one in batch]
    media = request.media([one.prompt for one in batch], seeds)
    absent = _absent(request.out, batch)
    for one, frames in zip(batch, media, strict=True):
        if one in absent:
            _write(request.out / one.file_name, frames, one.fps)
    with (request.out / LISTING).open("a") as listing:
        listing.writelines(_lines(absent, request.seed))
    return len(absent)


def _write(file: Path, frames: "Tensor", fps: float | None) -> None:
    from PIL import Image

    from flowalign.media.encode import write_clip
    from flowalign.media.thumbnails import bytes_of

    if fps:
        write_clip(file, frames, fps)
        return
    picture = Image.fromarray(bytes_of(frames[0]).permute(1, 2, 0).numpy())
    with atomic_write(file, alone=True) as partial:
        picture.save(partial, format="PNG")


def _absent(out: Path, batch: Sequence[Medium]) -> list[Medium]:
    return [one for one in batch if not (out / one.file_name).exists()]


def _list(out: Path, media: Sequence[Medium], seed: int) -> None:
    """List the existing files in order, in a form that `flowalign score` and training read."""
    absent = set(_absent(out, media))
    existing = [one for one in media if one not in absent]
    write_text(out / LISTING, "".join(_lines(existing, seed)))


def _lines(media: Sequence[Medium], seed: int) -> Iterator[str]:
    for one in media:
        row = {"id": one.id, "file_name": one.file_name, "prompt": one.prompt, "seed": seed}
        row |= {"copy": one.copy} | ({"fps": one.fps} if one.fps else {})
        yield json.dumps(row) + "\n"
