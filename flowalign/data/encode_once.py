"""Compute latents of media and embeddings of prompts once, and cache them in a folder.

<folder>/<encoder>/ is a `TensorCache`, keyed by the content of the media or of the requests.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from flowalign.data.prefetch import prefetch
from flowalign.data.tensor_store import Key, Keys, TensorCache, is_latent, read_latent
from flowalign.distributed.processes import ALONE, Processes
from flowalign.types import Cond, Policy, Request, encode_requests
from flowalign.utils.media.decode import decode
from flowalign.utils.media.media import Media, MediaProblem, digest_media

FLIPS = (False, True)
MEDIA_AT_ONCE = 2048
"""Number of media items that are read, and stay in memory, before all processes encode them."""


class LatentCache:
    """Cache of the clean latents of media under a loaded policy, keyed by file content."""

    def __init__(
        self,
        policy: Policy,
        folder: Path | None,
        dtype: torch.dtype = torch.float32,
        max_frames: int | None = None,
        batch: int = 8,
        processes: Processes = ALONE,
    ):
        """Open the cache for a policy.

        Latents are stored in `dtype`. `max_frames` evenly spaced frames of a video are encoded;
        None: the first `policy.num_frames` frames at the frame rate of the policy. `batch` media
        items are encoded at once.
        """
        self.policy, self.dtype, self.max_frames, self.batch = policy, dtype, max_frames, batch
        self.store = TensorCache(folder / self.encoder if folder else None, processes)
        self.num_encoded = 0
        """Number of latents that were computed instead of read from the cache."""
        self.num_stored = 0
        """Number of latents that the dataset itself stores as files."""

    @cached_property
    def encoder(self) -> str:
        """Return the id of the policy's media encoder; this reads weights."""
        return self.policy.encoders()[0]

    def prepare(self, media: Sequence[Media], flips: bool) -> dict[int, str]:
        """Encode missing media; return the reason of each failure by index.

        With `flips`, the mirror images (left to right) are encoded as well. Latents of one call
        share files, so pass many items at once.
        """
        failed: dict[int, str] = {}
        keys: dict[int, Keys] = {}
        for i, medium in enumerate(media):
            try:
                keys[i] = tuple(self._key(medium, flip) for flip in FLIPS[: 1 + flips])
            except (OSError, ValueError) as error:
                failed[i] = str(error)
        broken = self.store.fill({some: media[i] for i, some in keys.items()}, self._encode)
        failures = {i: broken[key] for i in keys for key in keys[i] if key in broken}
        return failed | failures

    def identify(self, medium: Media) -> Media:
        """Return the media item with its digest; an unchanged file is read only once.

        Raises:
            ValueError: The item has neither a path nor data.
            OSError: The file cannot be read.
        """
        return replace(medium, digest=digest_media(medium).hex())

    def read(self, media: Sequence[Media], flipped: Sequence[bool]) -> Float[Tensor, "n *latent"]:
        """Return latents of prepared media, mirrored where `flipped`, in float32 on the CPU.

        Raises:
            ValueError: An item was not prepared, or latents differ in shape.
        """
        keys = [self._key(medium, flip) for medium, flip in zip(media, flipped, strict=True)]
        for key in self.store.missing(keys):
            medium = media[keys.index(key)]
            raise ValueError(f"no latent of {medium}: it was not prepared, or its encoding failed")
        return self.store.read(keys)["latent"].float()

    def _key(self, medium: Media, flip: bool) -> Key:
        how = f" {flip} {self.max_frames} {self.dtype}"
        if self.policy.fps:
            how += f" {self.policy.fps} {self.policy.num_frames} {medium.fps}"
        digest = bytes.fromhex(medium.digest) if medium.digest else digest_media(medium)
        return hashlib.sha256(digest + how.encode()).digest()

    def _encode(self, todo: Sequence[tuple[Keys, Media]]) -> dict[Key, str]:
        """Encode media in batches of equal shape and store the latents; return failures by key."""
        parts = [todo[i : i + self.batch] for i in range(0, len(todo), self.batch)]
        ahead = prefetch(lambda n: self._decode(parts[n]), range(len(parts)), ahead=2)
        broken: dict[Key, str] = {}
        try:
            for decoded, _ in ahead:
                shapes: dict[torch.Size, dict[Key, Tensor]] = {}
                for key, pixels in decoded.items():
                    if isinstance(pixels, str):
                        broken[key] = pixels
                    elif pixels.is_floating_point():
                        self.store.put(key, {"latent": pixels})
                        self.num_stored += 1
                    else:
                        shapes.setdefault(pixels.shape, {})[key] = pixels
                for alike in shapes.values():
                    broken |= self._embed(alike)
        finally:
            self.store.flush()
        return broken

    def _decode(self, part: Sequence[tuple[Keys, Media]]) -> dict[Key, Tensor | str]:
        """Decode media to 8-bit frames or read their latents; a string is a reason of failure."""
        found: dict[Key, Tensor | str] = {}
        for keys, medium in part:
            try:
                if is_latent(medium):
                    found |= dict.fromkeys(keys, self._adopt(medium, flips=len(keys) > 1))
                    continue
                pixels = self._pixels(medium)
                mirrored = self._key(medium, True)
                found |= {key: pixels.flip(-1) if key == mirrored else pixels for key in keys}
            except (OSError, ValueError) as error:
                found |= dict.fromkeys(keys, str(error))
        return found

    def _pixels(self, medium: Media) -> UInt8[Tensor, "F 3 H W"]:
        if self.max_frames:
            return decode(medium, self.max_frames).pixels
        return decode(medium, fps=self.policy.fps, num_frames=self.policy.num_frames).pixels

    def _adopt(self, medium: Media, flips: bool) -> Float[Tensor, "*latent"]:
        """Read a latent from its file; raise MediaProblem if the policy cannot train on it."""
        if flips or self.max_frames:
            remedy = "set data.flip to 0 and data.max_frames to null"
            raise MediaProblem(f"latent that cannot be changed: {medium.path}; {remedy}")
        latent = read_latent(str(medium.path), self.encoder)
        if not latent.isfinite().all():
            raise MediaProblem(f"latent that is not finite: {medium.path}")
        return latent.to(self.dtype)

    @torch.no_grad()
    def _embed(self, pixels: Mapping[Key, UInt8[Tensor, "F 3 H W"]]) -> dict[Key, str]:
        broken: dict[Key, str] = {}
        keys = list(pixels)
        for some in (keys[i : i + self.batch] for i in range(0, len(keys), self.batch)):
            frames = torch.stack([pixels[key] for key in some]).float() / 255
            try:
                latents = self.policy.embed(frames).to("cpu", self.dtype)
            except ValueError as error:
                broken |= dict.fromkeys(some, str(error))
                continue
            self.num_encoded += len(some)
            for key, latent in zip(some, latents, strict=True):
                if latent.isfinite().all():
                    self.store.put(key, {"latent": latent})
                else:
                    broken[key] = f"its latent is not finite in {self.dtype}"
        return broken


class EncodeQueue:
    """Queue that encodes media while a dataset is read, to limit the bytes in memory."""

    def __init__(self, latents: LatentCache, flips: bool):
        self.latents, self.flips = latents, flips
        self.failed: dict[Media, str] = {}
        """Reason of each failed item; complete after `finish`."""
        self._known: dict[Media, Media] = {}
        self._waiting: dict[Media, Media] = {}

    def take(self, medium: Media) -> Media:
        """Queue an item for encoding; return it without bytes, as the same object each time."""
        try:
            found = self.latents.identify(medium)
        except (OSError, ValueError):
            found = medium  # `prepare` will report it
        kept = replace(found, data=None)
        if kept not in self._known:
            self._known[kept], self._waiting[kept] = kept, found
            if len(self._waiting) >= MEDIA_AT_ONCE:
                self.finish()
        return self._known[kept]

    def finish(self) -> None:
        """Encode the queued media. All processes must call this the same number of times."""
        kept = list(self._waiting)
        failed = self.latents.prepare(list(self._waiting.values()), self.flips)
        self.failed |= {kept[i]: why for i, why in failed.items()}
        self._waiting.clear()


class PromptEmbeddingCache:
    """Cache of the conditioning that a loaded policy computes from requests."""

    def __init__(
        self, policy: Policy, folder: Path | None, batch: int = 32, processes: Processes = ALONE
    ):
        """Open the cache for a policy; `batch` requests are encoded at once."""
        self.policy, self.batch = policy, batch
        self.store = TensorCache(folder / policy.encoders()[1] if folder else None, processes)
        self.num_encoded = 0
        """Number of requests that were encoded instead of read from the cache."""

    def prepare(self, requests: Sequence[Request]) -> None:
        """Encode missing requests; requests of one call share files, so pass many at once."""
        self.store.fill({(request.input_digest,): request for request in requests}, self._encode)

    def read(self, requests: Sequence[Request]) -> Cond:
        """Return one row of conditioning per prepared request, on the CPU, in the policy's dtype.

        Raises:
            ValueError: A request was not prepared.
        """
        keys = [request.input_digest for request in requests]
        for key in self.store.missing(keys):
            raise ValueError(f"prompt {requests[keys.index(key)].prompt!r} was not prepared")
        return self.store.read(keys)

    @torch.no_grad()
    def _encode(self, todo: Sequence[tuple[Keys, Request]]) -> dict[Key, str]:
        """Encode requests and store their conditioning; return {}, because no request fails."""
        try:
            for some in (todo[i : i + self.batch] for i in range(0, len(todo), self.batch)):
                encoded = encode_requests(self.policy, [request for _, request in some])
                cond = {name: value.cpu() for name, value in encoded.items()}
                self.num_encoded += len(some)
                for n, ((key,), _) in enumerate(some):
                    self.store.put(key, {name: value[n] for name, value in cond.items()})
        finally:
            self.store.flush()
        return {}


def cache_report(latents: LatentCache, texts: PromptEmbeddingCache, processes: Processes) -> str:
    """Return a line with the numbers of cached and encoded items, over all processes."""
    mine = {
        "latents": latents.num_encoded,
        "prompts": texts.num_encoded,
        "stored": latents.num_stored,
        "damaged": latents.store.num_damaged + texts.store.num_damaged,
    }
    total = processes.sum_by_name({name: float(count) for name, count in mine.items()})
    now = {name: int(count) for name, count in total.items()}
    lines = [
        f"{now[name] + store.num_found:,} {name}: {now[name]:,} encoded now, "
        f"{store.num_found:,} from the cache"
        for name, store in (("latents", latents.store), ("prompts", texts.store))
    ]
    if now["stored"]:
        lines.append(f"latents that the dataset holds: {now['stored']:,}")
    if now["damaged"]:
        lines.append(f"damaged files of the cache, deleted: {now['damaged']:,}")
    return "; ".join(lines)
