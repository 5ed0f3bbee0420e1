"""Reads and frees the encoders of prompts of a pipeline apart from its other parts."""

import hashlib
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flowalign.types import EncodesApart, Request
from pipelines.encoding import probe
from pipelines.folder import file_in
from pipelines.intact import check_finite, parts_of
from pipelines.quantization import quantizers
from pipelines.weights import DTYPES, load_pipeline

_ENCODERS = ("text_encoder", "image_encoder")
_CHANGES_NOTHING = {"self", "path", "lora", "gradient_checkpointing", "memory"}
"""Settings of policies on which no `encode` depends; of the path, files are read. All others are
attributes by their names."""
_WHOLE, _PIECES, _PIECE = 1 << 20, 1024, 4096
"""Bytes of a file that its digest reads: the first, and of equally spaced pieces."""


class EncodersApart(EncodesApart):
    """Frees the encoders of a `DiffusersPolicy`, which is one of these."""

    def check_prompt_store(self: Any) -> None:
        if self.replays_at_load:
            raise ValueError(
                f"prompt_cache: {type(self).__name__} needs the encoders while it loads, to record "
                "the calls of its pipeline; use the policy of the family, or leave it out"
            )

    def encoding_files(self: Any) -> str:
        if not Path(self.path).is_dir():  # of the hub: its id and commit
            return f"{self.path} {file_in(self.path, 'model_index.json').resolve().parent.name}"
        found = hashlib.sha256()
        spared = ("scheduler", self.part, *(() if self.takes.references[1] else ("vae",)))
        for name in sorted(parts_of(self.pipeline_class, self.path)):
            if not name.startswith(spared):
                for file in sorted(Path(self.path, name).rglob("*")):
                    found.update(_sample(file) if file.is_file() else b"")
        return found.hexdigest()

    def encoding_settings(self: Any) -> str:
        names = inspect.signature(type(self).__init__).parameters.keys() - _CHANGES_NOTHING
        told = {name: vars(self)[name] for name in sorted(names)}
        return repr((type(self).__name__, self.quantization.text_encoders, told))

    def absent(self: Any) -> dict[str, None]:
        """Return the parts that `load` leaves out, as components of a pipeline."""
        return dict.fromkeys(self._encoders()) if self.prompt_store else {}

    def read_encoders(self: Any, device: torch.device) -> None:
        parts, names = self.pipe.components, list(self._encoders())
        if all(parts[name] is None for name in names):
            without = {n: None if isinstance(p, nn.Module) else p for n, p in parts.items()}
            others = {n: p for n, p in without.items() if n not in names}
            bits = {n: one for n, one in quantizers(self).items() if n in names}
            dtype = DTYPES[self.precision]
            read = load_pipeline(self.pipeline_class, self.path, dtype, bits, **others)
            found = {name: read.components[name] for name in names}
            check_finite(self.path, found)
            self.pipe.register_modules(**found)
        for name in names:
            self.pipe.components[name].to(device)

    def free_encoders(self: Any) -> None:
        self.pipe.register_modules(**dict.fromkeys(self._encoders()))

    def probes(self: Any) -> Sequence[Request]:
        return [probe(text, self.takes, self.height, self.width) for text in ("a", "b")]

    def _encoders(self: Any) -> Iterator[str]:
        for name in parts_of(self.pipeline_class, self.path):
            if name.startswith(_ENCODERS) and name not in self.unused:
                yield name


def _sample(file: Path) -> bytes:
    """Return name, size, beginning and equally spaced pieces of a file."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        pieces = [f"{file.name} {size}".encode(), opened.read(_WHOLE)]
        for place in range(_WHOLE, size, max(_PIECE, (size - _WHOLE) // _PIECES)):
            opened.seek(place)
            pieces.append(opened.read(_PIECE))
    return b"".join(pieces)
