"""Decide which rows a dataset can use, and count the dropped rows by reason."""

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from flowalign.data.preference.preference_data import Pair, Sample
from flowalign.data.tensor_store import is_latent, latent_shape
from flowalign.utils.media.decode import is_video, open_video
from flowalign.utils.media.media import (
    Media,
    MediaProblem,
    digest_media,
    list_frame_files,
    require_file,
)
from flowalign.utils.media.pixels import Orientation, count_frames, open_picture, read_upright_size

NAMED = 5
"""Number of occurrences that a report names for each kind of problem."""
EXPECTED = {
    "tie",
    "no answer",
    "single item",
    "neither liked nor disliked",
    "repeated pair",
    "repeated item",
}
"""Kinds that published datasets contain by design; every other kind is an error in the row."""


@dataclass
class DropReport:
    """Counts of dropped rows by kind of problem, with the first occurrences."""

    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    """First occurrences of each kind: file and row, then the details."""

    def add(self, problem: str, where: str = "") -> None:
        """Count a problem of the form "kind: details" at the row `where`."""
        kind, _, details = problem.partition(": ")
        self.dropped[kind] += 1
        named = self.examples.setdefault(kind, [])
        if len(named) < NAMED:
            named.append(": ".join(filter(None, (where, details))))

    @property
    def total(self) -> int:
        """Return the number of dropped rows, pairs and samples."""
        return self.dropped.total()

    @property
    def unusable(self) -> int:
        """Return the number dropped for an error, that is, for all kinds not in `EXPECTED`."""
        return self.total - sum(self.dropped[kind] for kind in EXPECTED)

    def lines(self) -> list[str]:
        """Return one line per kind, errors before expected kinds, and the most frequent first."""
        errors_first = sorted(self.dropped.most_common(), key=lambda item: item[0] in EXPECTED)
        return [
            f"{count:,} {kind}: {'; '.join(self.examples[kind])}" for kind, count in errors_first
        ]

    def summary(self) -> dict[str, Any]:
        """Return counts and first occurrences by kind, ready for JSON."""
        return {
            kind: {"count": count, "first": self.examples[kind]}
            for kind, count in self.dropped.most_common()
        }


Shape = tuple[int, int, int]
"""Width, height and number of frames."""


class Inspection:
    """Validation of media, with cached results for files and folders, but not for bytes."""

    def __init__(self) -> None:
        self._size_of, self._shape_of = cache(_count_bytes), cache(_read_shape)

    def of_pair(self, chosen: Media, rejected: Media, mixed_shapes: bool = False) -> str:
        """Return why two items cannot be a pair, as "kind: details"; "" if they can."""
        try:
            if self.same(chosen, rejected):
                return f"the media are equal: {chosen.name} and {rejected.name}"
            if mixed_shapes:
                return ""
            first, second = self.shape(chosen), self.shape(rejected)
        except MediaProblem as problem:
            return str(problem)
        if first[:2] != second[:2]:
            sides = [f"{width} x {height}" for width, height, _ in (first, second)]
            return f"the media differ in size: {' and '.join(sides)}"
        if first[2] != second[2]:
            return f"the media differ in frames: {first[2]} and {second[2]}"
        return ""

    def of_one(self, medium: Media) -> str:
        """Return why an image or video cannot be used; "" if it can."""
        try:
            self.shape(medium)
        except MediaProblem as problem:
            return str(problem)
        return ""

    def missing(self, *paths: str) -> str:
        """Return a message that names the first missing file; "" if all exist."""
        try:
            for path in paths:
                self._size(Media(path))
        except MediaProblem as problem:
            return str(problem)
        return ""

    def same(self, first: Media, second: Media) -> bool:
        """Return whether two items have the same content; files are only read if sizes are equal.

        Raises:
            MediaProblem: A file is missing.
        """
        sizes = self._size(first), self._size(second)
        if first.path and first.path == second.path:
            return True
        return sizes[0] == sizes[1] and digest_media(first) == digest_media(second)

    def pair_key(self, pair: Pair) -> bytes:
        """Return a hash of prompt, media, dimension and annotator, equal for repeated pairs."""
        samples = [self.sample_key(sample) for sample in (pair.chosen, pair.rejected)]
        return _hash(*samples, pair.dimension.encode(), pair.user.encode())

    def sample_key(self, sample: Sample, judged_alone: bool = False) -> bytes:
        """Return a hash of the sample's request and content.

        With `judged_alone`, annotator and label are hashed as well.
        """
        path = sample.media.path
        medium = path.encode() if path else digest_media(sample.media)
        judgement = f"{sample.user} {sample.desirable}" if judged_alone else ""
        return _hash(sample.request.input_digest, medium, judgement.encode())

    def shape(self, medium: Media) -> Shape:
        """Return the width, height and number of frames that `decode` would give.

        Only headers and the first frame are read.

        Raises:
            MediaProblem: The file is missing, or neither image nor video; or the folder is empty.
        """
        if medium.path is None:
            return _read_shape(medium)
        if not self._size(medium):
            raise MediaProblem(f"empty file: {medium.path}")
        return self._shape_of(medium)

    def _size(self, medium: Media) -> int:
        return len(medium.data or b"") if medium.path is None else self._size_of(medium.path)


def _count_bytes(path: str) -> int:
    files = list_frame_files(Path(path)) if Path(path).is_dir() else [Path(path)]
    return sum(map(require_file, files))


def _read_shape(medium: Media) -> Shape:
    if medium.path and is_latent(medium):
        return latent_shape(medium.path)
    if medium.path and Path(medium.path).is_dir():
        frames = list_frame_files(Path(medium.path))
        width, height, _ = _picture(Media(str(frames[0])))
        return width, height, len(frames)
    return (_video if is_video(medium) else _picture)(medium)


def _picture(medium: Media) -> Shape:
    """Return the shape of an image as `decode` rotates it."""
    with open_picture(medium.source, medium.name) as image:
        return *read_upright_size(image, medium.name), count_frames(image)


def _video(medium: Media) -> Shape:
    """Return the shape of a video; frames are counted if the header lacks their number."""
    with open_video(medium, "unreadable") as (container, stream):
        orientation, sides, count = Orientation(medium, stream), None, 0
        for packet in container.demux(stream):
            count += packet.size > 0
            if not sides:
                sides = next((orientation.show(frame).shape for frame in packet.decode()), None)
            if sides and stream.frames:
                break
        if not sides:
            raise MediaProblem(f"no frames: {medium.name}")
        return sides[1], sides[0], stream.frames or count


def _hash(*parts: bytes) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        # Hash the length as well: otherwise ("ab", "c") and ("a", "bc") would collide.
        found.update(len(part).to_bytes(8) + part)
    return found.digest()
