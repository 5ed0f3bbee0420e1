"""Cache features of frozen backbones on disk, and embed users from a few of their choices.

<folder>/<fingerprint of the backbone>/<hash of its keys>.safetensors holds some hundred rows: `key`
(SHA-256 of sample and prompt), `joint` and `prompt`. Files are written atomically and never
changed. So several processes may share a folder, and a kill loses at most one file's work.

Source of the embeddings of users: PPD, arXiv:2501.06655, known from secondary sources. There a
vision-language model sees four choices of a user, and its hidden state is the embedding. Our
reconstruction uses a token per choice: the difference between the features of the chosen and the
rejected sample, from any backbone.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowalign.data.media.decode import decode
from flowalign.data.media.media import Media
from flowalign.functional.rating import Features
from flowalign.types import Backbone, MediaBatch
from flowalign.utils.files import atomic_write

PER_FILE = 256
"""Number of samples embedded before their features are written to one file."""
Frames = Callable[[Media], Tensor]
"""Reader of an image or video as RGB in [0, 1], [F, 3, H, W]; raises ValueError or OSError on
failure."""
Key = bytes


@dataclass(frozen=True)
class RewardSample:
    """Image or video, and its prompt."""

    media: Media
    prompt: str
    references: Sequence[Media] = ()
    """Sources of an edit, for backbones that read them."""

    def key(self, reads_prompts: bool, reads_references: bool = False) -> Key:
        """Return a hash of the content, so equal inputs of the backbone share features."""
        content = _hash_medium(self.media) + (self.prompt.encode() if reads_prompts else b"")
        if reads_references:
            content = b"".join(map(_hash_medium, self.references)) + content
        return hashlib.sha256(content).digest()


def _hash_medium(medium: Media) -> bytes:
    data = medium.data
    if data is None:
        if medium.path is None:
            raise ValueError("the sample has neither a path nor data")
        data = Path(medium.path).read_bytes()
    return hashlib.sha256(data).digest()


class Embeddings:
    """Features of samples under the current weights of a loaded backbone, cached in `folder`.

    Without a folder, they are only kept in memory.
    """

    def __init__(self, backbone: Backbone, frames: Frames, folder: Path | None = None):
        self.backbone, self.frames = backbone, frames
        self.folder = folder / backbone.fingerprint if folder else None
        self.num_computed = 0
        """Number of features that were computed because the cache lacked them."""
        self.num_damaged = 0
        """Number of unreadable cache files; they were deleted and are computed again."""
        self._known: dict[Key, tuple[Tensor, Tensor]] = {}
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)
            for file in sorted(self.folder.glob("*.safetensors")):
                self._read(file)

    def __call__(self, samples: Sequence[RewardSample]) -> tuple[Features, dict[int, str]]:
        """Return features, a row per sample, and the reasons of failed samples by index (NaN rows).

        Raises:
            ValueError: All samples failed.
        """
        failed: dict[int, str] = {}
        keys: list[Key | None] = []
        for i, sample in enumerate(samples):
            keys.append(self._key(sample, i, failed))
        missing = {k: i for i, k in enumerate(keys) if k is not None and k not in self._known}
        todo = list(missing.items())
        for start in range(0, len(todo), PER_FILE):
            self._compute(samples, todo[start : start + PER_FILE], failed)
        failed |= {
            i: failed[missing[k]]
            for i, k in enumerate(keys)
            if k in missing and missing[k] in failed
        }
        return self._table(keys), failed

    def _key(self, sample: RewardSample, i: int, failed: dict[int, str]) -> Key | None:
        try:
            return sample.key(self.backbone.reads_prompts, self.backbone.reads_references)
        except (OSError, ValueError) as error:
            failed[i] = str(error)
            return None

    @torch.no_grad()
    def _compute(
        self,
        samples: Sequence[RewardSample],
        todo: Sequence[tuple[Key, int]],
        failed: dict[int, str],
    ) -> None:
        features, broken = embed_samples(self.backbone, self.frames, [samples[i] for _, i in todo])
        failed |= {todo[row][1]: why for row, why in broken.items()}
        good = [row for row in range(len(todo)) if row not in broken]
        keys = [todo[row][0] for row in good]
        for key, row in zip(keys, good, strict=True):
            self._known[key] = features.joint[row], features.prompt[row]
        self.num_computed += len(good)
        if self.folder and good:
            self._write(self.folder, keys, features.take(torch.tensor(good)))

    def _write(self, folder: Path, keys: Sequence[Key], features: Features) -> None:
        name = hashlib.sha256(b"".join(keys)).hexdigest()[:32]
        table = torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.uint8).view(-1, 32)
        rows = {"key": table, "joint": features.joint, "prompt": features.prompt}
        try:
            with atomic_write(folder / f"{name}.safetensors") as partial:
                save_file({k: v.contiguous() for k, v in rows.items()}, partial)
        except SafetensorError as error:  # how safetensors reports a full disk
            raise OSError(str(error)) from error

    def _read(self, file: Path) -> None:
        try:
            rows = load_file(file)
            table = zip(rows["key"].numpy(), rows["joint"], rows["prompt"], strict=True)
            self._known |= {key.tobytes(): (joint, prompt) for key, joint, prompt in table}
        except (SafetensorError, KeyError, ValueError):
            self.num_damaged += 1
            file.unlink()

    def _table(self, keys: Sequence[Key | None]) -> Features:
        found = next((self._known[k] for k in keys if k in self._known), None)
        if found is None:
            raise ValueError("no sample could be read and embedded")
        absent = tuple(torch.full_like(part, torch.nan) for part in found)
        rows = [absent if k is None else self._known.get(k, absent) for k in keys]
        return Features(torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows]))


def embed_samples(
    backbone: Backbone, frames: Frames, samples: Sequence[RewardSample]
) -> tuple[Features, dict[int, str]]:
    """Read and embed samples, grouped by shape; failed samples get NaN and a reason.

    Features are on the CPU, in float32, and keep the gradient of an adapter.
    """
    media: dict[int, Tensor] = {}
    sources: dict[int, list[Tensor]] = {}
    failed: dict[int, str] = {}
    for i, sample in enumerate(samples):
        try:
            sources[i] = _sources(backbone, frames, sample)
            media[i] = frames(sample.media)
        except (OSError, ValueError) as error:
            failed[i] = str(error)
    shapes: dict[tuple[int, ...], list[int]] = {}
    for i, pixels in media.items():
        shapes.setdefault(tuple(pixels.shape), []).append(i)
    rows: dict[int, tuple[Tensor, Tensor]] = {}
    for some in shapes.values():
        batch = MediaBatch(
            torch.stack([media[i] for i in some]),
            [samples[i].prompt for i in some],
            references=[sources[i] for i in some] if backbone.reads_references else (),
        )
        features = backbone.embed(batch).to(torch.device("cpu"))
        rows |= {i: (features.joint[n], features.prompt[n]) for n, i in enumerate(some)}
    for i, (joint, prompt) in rows.items():
        if not (joint.detach().isfinite().all() and prompt.detach().isfinite().all()):
            failed[i] = "the backbone returned a feature that is not finite"
    if not rows:
        return Features(
            torch.full((len(samples), 1), torch.nan), torch.zeros(len(samples), 0)
        ), failed
    first = next(iter(rows.values()))
    absent = tuple(torch.full_like(part, torch.nan) for part in first)
    full = [rows.get(i, absent) for i in range(len(samples))]
    return Features(torch.stack([r[0] for r in full]), torch.stack([r[1] for r in full])), failed


def _sources(backbone: Backbone, frames: Frames, sample: RewardSample) -> list[Tensor]:
    """Return the first frames of a sample's references, if the backbone reads them."""
    if not backbone.reads_references:
        return []
    if not sample.references:
        raise ValueError("its source image is missing")
    return [frames(reference)[0] for reference in sample.references]


def frames_for(backbone: Backbone) -> Frames:
    """Return a reader of images and videos with the backbone's number of frames."""

    def read(medium: Media) -> Float[Tensor, "F 3 H W"]:
        return decode(medium, backbone.num_frames).frames

    return read
