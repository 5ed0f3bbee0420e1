"""Store tensors in files: caches of rows, conditioning of requests, and clean latents.

A cache has rows by key in a folder; each row is computed once, by one of all processes.

<folder>/<hash of its keys>.safetensors holds up to 256 rows and about 64 MiB. Its tensor `key` has
SHA-256 hashes of the inputs and of the encoding settings. Files are written atomically and never
changed, so several processes may share a folder, and a killed process loses at most one file.
Files are mapped into memory, so a batch reads only its own rows, even from a large folder.
"""

import hashlib
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowalign.distributed.processes import ALONE, Processes
from flowalign.types import Cond, Policy, PromptCache, PromptEncoder, Request
from flowalign.utils.files import atomic_write
from flowalign.utils.media.media import Media, MediaProblem

ROWS_PER_FILE = 256
BYTES_PER_FILE = 1 << 26

Key = bytes
Keys = tuple[Key, ...]
"""Keys of the rows that are computed from one input, such as an image and its mirror image."""
Row = Mapping[str, Tensor]
T = TypeVar("T")


class TensorCache:
    """Cache of tensor rows by key, in a folder or, if `folder` is None, in memory."""

    def __init__(self, folder: Path | None, processes: Processes = ALONE):
        self.folder, self.processes = folder, processes.ungrouped
        self.num_found = 0
        """Number of rows that `fill` found in the cache."""
        self.num_damaged = 0
        """Number of unreadable files that this process deleted."""
        self._places: dict[Key, tuple[Mapping[str, Tensor], int]] = {}
        self._mapped: set[str] = set()
        self._pending: dict[tuple, dict[Key, Row]] = {}
        if folder:
            folder.mkdir(parents=True, exist_ok=True)

    def missing(self, keys: Sequence[Key]) -> list[Key]:
        """Return the keys that no process has written."""
        if any(key not in self._places for key in keys):
            self._refresh()
        return [key for key in keys if key not in self._places]

    def fill(
        self,
        wanted: Mapping[Keys, T],
        compute: Callable[[Sequence[tuple[Keys, T]]], dict[Key, str]],
    ) -> dict[Key, str]:
        """Compute the missing rows; return the reason of each failure by key.

        `compute` gets inputs with their missing keys, and must put a row for each key. Processes
        that share a folder divide the missing inputs and wait for each other, so all of them must
        call this.
        """
        keys = list(dict.fromkeys(chain(*wanted)))
        absent = dict.fromkeys(self.missing(keys))
        if self.folder:
            absent = self.processes.merge(absent)
        self.num_found += len(keys) - len(absent)
        todo = _select_missing(wanted, absent)
        mine = self.processes.share(todo) if self.folder else todo
        broken = self.processes.merge(compute(mine))
        unseen = self.missing([key for key in keys if key not in broken])
        return broken | compute(
            _select_missing(wanted, unseen)
        )  # a slow file system may hide new files

    def put(self, key: Key, row: Row) -> None:
        """Add a row. It is written and readable once its file is full, or after `flush`."""
        kind = tuple((name, value.dtype, value.shape) for name, value in row.items())
        alike = self._pending.setdefault(kind, {})
        alike[key] = row
        row_bytes = sum(value.nbytes for value in row.values())
        if len(alike) >= ROWS_PER_FILE or len(alike) * row_bytes >= BYTES_PER_FILE:
            self._write(self._pending.pop(kind))

    def flush(self) -> None:
        """Write the remaining rows, which do not fill a file."""
        while self._pending:
            self._write(self._pending.popitem()[1])

    def read(self, keys: Sequence[Key]) -> dict[str, Tensor]:
        """Return rows in the order of `keys`; every key must have been written.

        Raises:
            ValueError: Rows differ in shape.
        """
        places = [self._places[key] for key in keys]
        kinds = {tuple((name, *t.shape[1:]) for name, t in table.items()) for table, _ in places}
        if len(kinds) > 1:
            raise ValueError(f"rows of different shapes cannot be one batch: {sorted(kinds)}")
        return {
            name: torch.stack([table[name][row] for table, row in places]) for name in places[0][0]
        }

    def _refresh(self) -> None:
        for file in sorted(self.folder.glob("*.safetensors")) if self.folder else []:
            if file.name not in self._mapped:
                self._map(file)

    def _write(self, rows: Mapping[Key, Row]) -> None:
        names = next(iter(rows.values()))
        table = {name: torch.stack([row[name] for row in rows.values()]) for name in names}
        if self.folder is None:
            self._index(list(rows), table)
            return
        joined = b"".join(rows)
        partial = self.folder / f".{uuid.uuid4().hex}.tmp"
        file = self.folder / f"{hashlib.sha256(joined).hexdigest()[:32]}.safetensors"
        keys = torch.frombuffer(bytearray(joined), dtype=torch.uint8).view(len(rows), -1)
        try:
            save_file({"key": keys, **table}, partial)
            partial.replace(file)
        except SafetensorError as error:  # how safetensors reports a full disk
            raise OSError(str(error)) from error
        finally:
            partial.unlink(missing_ok=True)
        self._map(file)

    def _map(self, file: Path) -> None:
        try:
            table = load_file(file)
            keys = [key.tobytes() for key in table.pop("key").numpy()]
            if {len(value) for value in table.values()} != {len(keys)}:
                raise ValueError(f"{file} has tensors of different length")
        except FileNotFoundError:  # another process found it damaged
            return
        except (SafetensorError, KeyError, ValueError):
            self._discard(file)
            return
        self._mapped.add(file.name)
        self._index(keys, table)

    def _index(self, keys: Sequence[Key], table: Mapping[str, Tensor]) -> None:
        self._places |= {key: (table, row) for row, key in enumerate(keys)}

    def _discard(self, file: Path) -> None:
        with suppress(FileNotFoundError):  # the process that deletes the file counts it
            file.unlink()
            self.num_damaged += 1


def _select_missing(wanted: Mapping[Keys, T], absent: Iterable[Key]) -> list[tuple[Keys, T]]:
    """Return the inputs with missing rows, each with its missing keys."""
    gone = set(absent)
    found = ((tuple(key for key in keys if key in gone), one) for keys, one in wanted.items())
    return [(keys, one) for keys, one in found if keys]


class StoredPrompts(PromptCache):
    """Prompt cache in a folder; the encoders are moved to the device only for missing requests."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.caches: dict[str, TensorCache] = {}
        self._files = ""
        self.num_encoded = 0
        """Number of requests that this process has encoded."""

    def prepare(
        self, policy: Policy, requests: Sequence[Request], processes: Processes = ALONE
    ) -> None:
        """Encode missing requests and free the encoders. All processes must make the same call."""
        cache = self._cache(policy)
        cache.processes = processes
        wanted: dict[Keys, Request] = {(request.input_digest,): request for request in requests}
        cache.fill(wanted, lambda todo: self._encode(policy, cache, todo))
        cache.processes = ALONE
        _encoder(policy).free()

    def conditioning(self, policy: Policy, requests: Sequence[Request]) -> Cond:
        """Return one row per request, on the device of the policy."""
        cache, keys = self._cache(policy), [request.input_digest for request in requests]
        absent = {*cache.missing(keys)}
        todo = {key: one for key, one in zip(keys, requests, strict=True) if key in absent}
        self._encode(policy, cache, [((key,), one) for key, one in todo.items()])
        device = next(policy.denoiser.parameters()).device
        return {name: value.to(device) for name, value in cache.read(keys).items()}

    def _cache(self, policy: Policy) -> TensorCache:
        """Return the cache for the settings of a policy, which may differ between its copies."""
        files = self._files = self._files or _encoder(policy).digest_files()
        content = f"{files}\n{_encoder(policy).describe_settings(policy)}"
        name = hashlib.sha256(content.encode()).hexdigest()[:16]
        if name not in self.caches:
            self.caches[name] = TensorCache(self.folder / name)
        return self.caches[name]

    @torch.no_grad()
    def _encode(
        self, policy: Policy, cache: TensorCache, todo: Sequence[tuple[Keys, Request]]
    ) -> dict[Key, str]:
        """Encode and store requests; return {}, because no request fails.

        Requests are encoded one by one, because rounding depends on the batch size and a row must
        not depend on which other rows were missing. The encoders then stay in main memory.
        """
        if not todo:
            return {}
        encoder = _encoder(policy)
        encoder.read(next(policy.denoiser.parameters()).device)
        try:
            for (key,), request in todo:
                cond = policy.encode([request])
                cache.put(key, {name: value[0].cpu() for name, value in cond.items()})
        finally:
            cache.flush()
            encoder.read(torch.device("cpu"))
        self.num_encoded += len(todo)
        return {}


def _encoder(policy: Policy) -> PromptEncoder:
    assert policy.text_encoder, "a run file with a prompt cache for another policy is refused"
    return policy.text_encoder


_NAME, _ENCODER = "latent", "encoder"


def is_latent(medium: Media) -> bool:
    """Return whether the file name ends in .safetensors, which marks a latent."""
    return medium.path is not None and medium.path.endswith(".safetensors")


def save_latent(path: Path, latent: Float[Tensor, "*latent"], encoder: str) -> None:
    """Write a latent atomically; `encoder` is the first of `Policy.encoders()`."""
    with atomic_write(path) as partial:
        save_file({_NAME: latent.detach().cpu().contiguous()}, partial, {_ENCODER: encoder})


def read_latent(path: str, encoder: str) -> Float[Tensor, "*latent"]:
    """Read the latent of a file.

    Raises:
        MediaProblem: The file is missing or damaged, or belongs to another encoder.
    """
    with _open_file(path) as file:
        found = (file.metadata() or {}).get(_ENCODER)
        if found != encoder:
            raise MediaProblem(
                f"latent of another encoder: {path} was encoded by {found}, "
                f"the policy has {encoder}"
            )
        return file.get_tensor(_NAME)


def latent_shape(path: str) -> tuple[int, int, int]:
    """Return width, height and frames of a latent from the file's header.

    Raises:
        MediaProblem: The file is damaged, or does not contain the latent of a clip.
    """
    with _open_file(path) as file:
        shape = file.get_slice(_NAME).get_shape()
    if len(shape) != 4:
        raise MediaProblem(f"not the latent of a clip: {path} has shape {shape}, not [C, F, H, W]")
    return shape[3], shape[2], shape[1]


@contextmanager
def _open_file(path: str) -> Iterator[Any]:
    if not Path(path).is_file():
        raise MediaProblem(f"missing file: {path}")
    try:
        with safe_open(path, "pt") as file:
            if list(file.keys()) != [_NAME]:
                raise MediaProblem(f"not the latent of a clip: {path} holds {sorted(file.keys())}")
            yield file
    except SafetensorError as error:
        raise MediaProblem(f"damaged latent: {path} ({error})") from error
