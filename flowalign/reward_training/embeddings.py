"""Cache features of frozen backbones on disk, and embed users from a few of their choices.

<folder>/<fingerprint of the backbone>/ is a `TensorCache` with the rows `joint` and `prompt`.

Source of the embeddings of users: PPD, arXiv:2501.06655, known from secondary sources. There a
vision-language model sees four choices of a user, and its hidden state is the embedding. Our
reconstruction uses a token per choice: the difference between the features of the chosen and the
rejected sample, from any backbone.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from flowalign.data.preference.dataset import PreferenceDataset
from flowalign.data.preference.preference_data import Pair
from flowalign.data.tensor_store import Key, Keys, TensorCache
from flowalign.functional.rating import Features
from flowalign.types import Backbone, MediaBatch
from flowalign.utils.media.decode import decode
from flowalign.utils.media.media import Media, digest_media
from flowalign.utils.ranges import PositiveInt, require_ranges

_AT_ONCE = 256
"""Number of samples that are read and embedded together."""


@dataclass(frozen=True)
class RewardSample:
    """Image or video, and its prompt."""

    media: Media
    prompt: str
    references: Sequence[Media] = ()
    """Sources of an edit, for backbones that read them."""

    def key(self, reads_prompts: bool, reads_references: bool = False) -> Key:
        """Return a hash of the content, so equal inputs of the backbone share features."""
        content = digest_media(self.media) + (self.prompt.encode() if reads_prompts else b"")
        if reads_references:
            content = b"".join(map(digest_media, self.references)) + content
        return hashlib.sha256(content).digest()


class Embeddings:
    """Features of samples under the current weights of a loaded backbone, cached in `folder`.

    Without a folder, they are only kept in memory.
    """

    def __init__(self, backbone: Backbone, folder: Path | None = None):
        self.backbone = backbone
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
        stored = self.store.read([keys[i] for i in good])
        rows = zip(stored["joint"], stored["prompt"], strict=True)
        return _fill(dict(zip(good, rows, strict=True)), len(samples)), failed

    @torch.no_grad()
    def _compute(self, todo: Sequence[tuple[Keys, RewardSample]]) -> dict[Key, str]:
        """Embed samples and store their features; return failures by key."""
        broken: dict[Key, str] = {}
        for some in (todo[i : i + _AT_ONCE] for i in range(0, len(todo), _AT_ONCE)):
            features, lost = embed_samples(self.backbone, [one for _, one in some])
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
    backbone: Backbone, samples: Sequence[RewardSample]
) -> tuple[Features, dict[int, str]]:
    """Read and embed samples, grouped by shape; failed samples get NaN and a reason.

    Features are on the CPU, in float32, and keep the gradient of an adapter.
    """
    media: dict[int, Tensor] = {}
    sources: dict[int, list[Tensor]] = {}
    failed: dict[int, str] = {}
    for i, sample in enumerate(samples):
        try:
            sources[i] = _sources(backbone, sample)
            media[i] = read_frames(backbone, sample.media)
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
        missing = torch.full((len(samples), 1), torch.nan)
        return Features(missing, missing[:, :0]), failed
    return _fill(rows, len(samples)), failed


def _fill(rows: Mapping[int, tuple[Tensor, Tensor]], count: int) -> Features:
    """Return joint and prompt features of `count` samples; those that are absent are NaN."""
    absent = tuple(torch.full_like(part, torch.nan) for part in next(iter(rows.values())))
    joint, prompt = zip(*(rows.get(i, absent) for i in range(count)), strict=True)
    return Features(torch.stack(joint), torch.stack(prompt))


def _sources(backbone: Backbone, sample: RewardSample) -> list[Tensor]:
    """Return the first frames of a sample's references, if the backbone reads them."""
    if not backbone.reads_references:
        return []
    if not sample.references:
        raise ValueError("its source image is missing")
    return [read_frames(backbone, reference)[0] for reference in sample.references]


def read_frames(backbone: Backbone, medium: Media) -> Float[Tensor, "F 3 H W"]:
    """Read an image, or the backbone's number of frames of a video, in [0, 1].

    Raises:
        ValueError, OSError: It cannot be read.
    """
    return decode(medium, backbone.num_frames).frames


@dataclass(frozen=True, kw_only=True)
class UserEmbeddings:
    """Run file of `flowalign users`: a dataset of choices, a backbone and an output file."""

    backbone: Backbone
    """Network that embeds images or videos, such as `reward_models.PooledFrames`."""
    path: str
    """Dataset of pairs with the annotator in a column `user_id`."""
    schema: str = "auto"
    """Name of the dataset's reader. auto: detected from its columns."""
    root: str | None = None
    """Folder where relative paths begin. Null: the folder of the dataset."""
    columns: dict[str, str | list[str]] | None = None
    """Columns of the dataset by their names in flowalign. Null: as they are."""
    shots: PositiveInt = 4
    """Number of choices embedded per user, from the first one; users with fewer are left out."""
    micro_batch: PositiveInt = 32
    """Number of choices per call of the backbone."""
    output: str
    """Safetensors file of the embeddings [shots, dim] by user, for `policy.users` of a run file."""

    def __post_init__(self) -> None:
        """Raise ValueError for numbers out of range, and for a file that policies do not read."""
        require_ranges(self, "users")
        if not self.output.endswith(".safetensors"):
            raise ValueError(f"output is {self.output!r}; it must end in .safetensors")

    def select_choices(self) -> dict[str, list[Pair]]:
        """Return the first choices of every user who has made enough.

        Raises:
            ValueError: The dataset does not exist, or no user has made enough choices.
        """
        by_user: dict[str, list[Pair]] = {}
        settings = {"schema": self.schema, "root": self.root, "columns": self.columns}
        dataset = PreferenceDataset(path=self.path, **settings)
        for pair in dataset.read()[0]:
            if isinstance(pair, Pair):
                by_user.setdefault(pair.user, []).append(pair)
        enough = {u: p[: self.shots] for u, p in by_user.items() if u and len(p) >= self.shots}
        if not enough:
            most = max((len(p) for u, p in by_user.items() if u), default=0)
            remedy = f"the maximum is {most}: lower shots, or add pairs with a user_id"
            raise ValueError(f"{self.path}: no user has {self.shots} usable choices; {remedy}")
        return enough

    def embed(self) -> dict[str, Float[Tensor, "shots dim"]]:
        """Return the embeddings of all users, except users with unreadable choices.

        Raises:
            ValueError: `select_choices` would raise, or no user is left.
        """
        self.backbone.load()
        found = {}
        for user, pairs in self.select_choices().items():
            starts = range(0, len(pairs), self.micro_batch)
            tokens = torch.cat([self._tokens(pairs[i : i + self.micro_batch]) for i in starts])
            if tokens.isfinite().all():
                found[user] = tokens
        if not found:
            raise ValueError(f"{self.path}: every user has unreadable choices")
        return found

    @torch.no_grad()
    def _tokens(self, pairs: Sequence[Pair]) -> Float[Tensor, "n dim"]:
        """Return a unit vector per choice; NaN if an image or video cannot be read."""
        sides = [[RewardSample(s.media, s.prompt) for s in (p.chosen, p.rejected)] for p in pairs]
        samples = [sample for both in sides for sample in both]
        features, _ = embed_samples(self.backbone, samples)
        return choice_tokens(features.joint[0::2], features.joint[1::2])


def choice_tokens(
    chosen: Float[Tensor, "n dim"], rejected: Float[Tensor, "n dim"]
) -> Float[Tensor, "n dim"]:
    """Return unit vectors from rejected to chosen features, after each feature is normalised."""
    return normalize(normalize(chosen, dim=1) - normalize(rejected, dim=1), dim=1)
