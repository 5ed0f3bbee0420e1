"""Wraps Wan 2.1 image-to-video as a flowalign policy: every prompt comes with its first frame."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import WanImageToVideoPipeline
from PIL import Image, ImageOps
from torch import Tensor

from flowalign.types import Cond, Guidance, PositiveInt
from flowalign.utils.files import bundled
from pipelines.base import Precision
from pipelines.encoding import digest
from pipelines.video import Memory, Video
from pipelines.wan import LORA, VIDEO, Wan
from pipelines.weights import Lora

_TEXT = 512
"""Number of text tokens beside the image tokens, hard-coded in diffusers' network."""


class WanI2V(Wan):
    """Wraps a `WanImageToVideoPipeline` folder or hub identifier as an image-to-video policy.

    `images` is a JSONL file of objects with `prompt` and `image`, a path relative to the file. The
    rest of a run knows only prompts, so each prompt has exactly one image. An image is cropped
    around its centre to the aspect ratio of the video, then treated like in the pipeline.

    `cond` holds, beside the text, "image": the first frame's mask and latents, which the network
    sees with the state, and, for a network that takes them, "clip": features of the image. Such a
    network needs prompts of 512 tokens.
    """

    pipeline_class = WanImageToVideoPipeline

    def __init__(
        self,
        path: str,
        images: str,
        video: Video = VIDEO,
        guidance: Guidance = 5.0,
        lora: Lora | None = LORA,
        precision: Precision = "bf16",
        max_sequence_length: PositiveInt = 512,
        memory: Memory = Memory(),  # noqa: B008 (frozen)
    ):
        super().__init__(path, video, guidance, lora, precision, max_sequence_length, memory)
        self.images = bundled(images)

    def shape_of_latents(
        self, transformer: Mapping[str, Any], vae: Mapping[str, Any]
    ) -> tuple[int, ...]:
        self.pictures = pictures(self.images)
        self.probes = tuple(self.pictures)
        if transformer["added_kv_proj_dim"] is not None and self.max_sequence_length != _TEXT:
            raise ValueError(
                f"max_sequence_length is {self.max_sequence_length}; the network of {self.path} "
                f"takes the last {_TEXT} tokens for the prompt and those before for the picture: "
                f"give {_TEXT}"
            )
        return super().shape_of_latents(transformer, vae)

    def condition_channels(self, vae: Mapping[str, Any]) -> int:
        return vae["scale_factor_temporal"] + vae["z_dim"]

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Cond:
        """Encode prompts and their first frames, one row per prompt.

        Raises:
            ValueError: a prompt has no image in `images`.
        """
        without = sorted({p for p in prompts if p not in self.pictures})
        if without:
            raise ValueError(
                f"{len(without)} prompt(s) without a picture in {self.images}, "
                f"for example {without[0]!r}"
            )
        cond, different = dict(super().encode(prompts)), list(dict.fromkeys(prompts))
        rows = torch.tensor([different.index(p) for p in prompts], device=self.denoiser.device)
        frames = [cropped(self.pictures[p], self.width / self.height) for p in different]
        cond["image"] = torch.cat([self._first_frame(frame) for frame in frames])[rows]
        if self.pipe.components[self.part].config.image_dim is not None:
            cond["clip"] = self._features(frames).to(cond["text"].dtype)[rows]
        return cond

    def _first_frame(self, frame: Image.Image) -> Tensor:
        """Return mask and latents of a clip whose first frame is `frame`, the rest grey."""
        device = self.denoiser.device
        pixels = self.pipe.video_processor.preprocess(frame, self.height, self.width).to(device)
        clip = torch.zeros(1, 3, self.video.num_frames, self.height, self.width, device=device)
        clip[:, :, 0] = pixels
        latents = self.latents(clip)
        known = latents.new_zeros(1, self.pipe.vae_scale_factor_temporal, *latents.shape[2:])
        known[:, :, 0] = 1
        return torch.cat([known, latents], 1)

    def _features(self, frames: Sequence[Image.Image]) -> Tensor:
        device = self.denoiser.device
        with self.text_encoders():
            return torch.cat([self.pipe.encode_image(frame, device) for frame in frames])

    def answer(self, x: Tensor, time: Tensor, cond: Cond, text: str) -> Tensor:
        return self.call_denoiser(
            torch.cat([x, cond["image"]], 1),
            timestep=time,
            encoder_hidden_states=cond[text],
            encoder_hidden_states_image=cond.get("clip"),
        )

    def encoders(self) -> tuple[str, str]:
        media, text = super().encoders()
        found, encoder = hashlib.sha256(), self.pipe.components["image_encoder"]
        for prompt, file in sorted(self.pictures.items()):
            found.update(repr((prompt, hashlib.sha256(file.read_bytes()).hexdigest())).encode())
        settings = text, media, found.hexdigest()
        if encoder is None:
            return media, hashlib.sha256(repr(settings).encode()).hexdigest()[:16]
        return media, digest(encoder, encoder.config.to_dict(), *settings)


def pictures(file: str) -> dict[str, Path]:
    """Read the image files by prompt.

    Raises:
        ValueError: the file does not give exactly one existing image per prompt.
    """
    found: dict[str, Path] = {}
    for number, line in enumerate(_lines(file), 1):
        row = _row(line, f"{file}, line {number}")
        picture = Path(file).parent / row["image"]
        if not picture.is_file():
            raise ValueError(f"{file}, line {number}: there is no picture {picture}")
        if found.setdefault(row["prompt"], picture) != picture:
            raise ValueError(
                f"{file}, line {number}: prompt {row['prompt']!r} has two pictures, "
                f"{found[row['prompt']]} and {picture}; give the second another prompt"
            )
    if not found:
        raise ValueError(f"{file} names no pictures; lines are {_FORM}")
    return found


_FORM = '{"prompt": "...", "image": "..."}'


def _lines(file: str) -> list[str]:
    if not Path(file).is_file():
        raise ValueError(f"policy.images: {file} does not exist; it is a JSONL file of {_FORM}")
    return Path(file).read_text().splitlines()


def _row(line: str, where: str) -> Mapping[str, str]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is no JSON ({error.msg}); lines are {_FORM}") from error
    if not isinstance(row, dict) or not {"prompt", "image"} <= row.keys():
        raise ValueError(f"{where} must be {_FORM}, but is {line[:80]!r}")
    return row


def cropped(file: Path, proportion: float) -> Image.Image:
    """Return the largest centre crop whose width is `proportion` times its height, in RGB."""
    with Image.open(file) as opened:
        picture = ImageOps.exif_transpose(opened).convert("RGB")
    width = min(picture.width, round(picture.height * proportion))
    height = min(picture.height, round(picture.width / proportion))
    left, top = (picture.width - width) // 2, (picture.height - height) // 2
    return picture.crop((left, top, left + width, top + height))
