"""Cache rows of tensors by key in a folder; each row is computed once, by one of all processes.

<folder>/<hash of its keys>.safetensors holds up to 256 rows and about 64 MiB. Its tensor `key` has
SHA-256 hashes of the inputs and of the encoding settings. Files are written atomically and never
changed, so several processes may share a folder, and a killed process loses at most one file.
Files are mapped into memory, so a batch reads only its own rows, even from a large folder.
"""

import hashlib
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowalign.distributed.processes import ALONE, Processes

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
