"""Cache features of frozen backbones on disk, and embed users from a few of their choices.

<folder>/<fingerprint of the backbone>/ is a `TensorCache` with the rows `joint` and `prompt`.

Source of the embeddings of users: PPD, arXiv:2501.06655, known from secondary sources. There a
vision-language model sees four choices of a user, and its hidden state is the embedding. Our
reconstruction uses a token per choice: the difference between the features of the chosen and the
rejected sample, from any backbone.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.data.media.decode import decode
from flowalign.data.media.media import Media
from flowalign.data.tensor_store import Key, Keys, TensorCache
from flowalign.functional.rating import Features
from flowalign.types import Backbone, MediaBatch

_AT_ONCE = 256
"""Number of samples that are read and embedded together."""
Frames = Callable[[Media], Tensor]
"""Reader of an image or video as RGB in [0, 1], [F, 3, H, W]; raises ValueError or OSError on
failure."""


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
        self.store = TensorCache(folder / backbone.fingerprint if folder else None)
        self.num_computed = 0
        """Number of features that were computed because the cache lacked them."""

    def __call__(self, samples: Sequence[RewardSample]) -> tuple[Features, dict[int, str]]:
        """Return features, a row per sample, and the reasons of failed samples by index (NaN rows).

        Raises:
            ValueError: All samples failed.
        """
        failed: dict[int, str] = {}
        keys: dict[int, Key] = {}
        for i, sample in enumerate(samples):
            try:
                keys[i] = sample.key(self.backbone.reads_prompts, self.backbone.reads_references)
            except (OSError, ValueError) as error:
                failed[i] = str(error)
        broken = self.store.fill({(key,): samples[i] for i, key in keys.items()}, self._compute)
        failed |= {i: broken[key] for i, key in keys.items() if key in broken}
        good = [i for i in keys if i not in failed]
        if not good:
            raise ValueError("no sample could be read and embedded")
        rows = self.store.read([keys[i] for i in good])
        joint, prompt = (dict(zip(good, rows[name], strict=True)) for name in ("joint", "prompt"))
        return Features(_table(joint, len(samples)), _table(prompt, len(samples))), failed

    @torch.no_grad()
    def _compute(self, todo: Sequence[tuple[Keys, RewardSample]]) -> dict[Key, str]:
        """Embed samples and store their features; return failures by key."""
        broken: dict[Key, str] = {}
        for some in (todo[i : i + _AT_ONCE] for i in range(0, len(todo), _AT_ONCE)):
            features, lost = embed_samples(self.backbone, self.frames, [one for _, one in some])
            for row, ((key,), _) in enumerate(some):
                if row in lost:
                    broken[key] = lost[row]
                else:
                    joint, prompt = features.joint[row], features.prompt[row]
                    self.store.put(key, {"joint": joint, "prompt": prompt})
            self.store.flush()
        self.num_computed += len(todo) - len(broken)
        return broken


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
    joint, prompt = ({i: row[part] for i, row in rows.items()} for part in (0, 1))
    return Features(_table(joint, len(samples)), _table(prompt, len(samples))), failed


def _table(rows: Mapping[int, Tensor], count: int) -> Tensor:
    """Return a table of `count` rows; those that are absent are NaN."""
    absent = torch.full_like(next(iter(rows.values())), torch.nan)
    return torch.stack([rows.get(i, absent) for i in range(count)])


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
