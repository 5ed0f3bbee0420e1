"""Reads the configuration files of a pipeline folder before weights are read, and checks them."""

import hashlib
import importlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flowalign.utils.files import read_object
from flowalign.utils.hub import cached_file, file_of
from flowalign.utils.live_objects import find_object
from pipelines.parts.libraries import diffusers, find_class
from pipelines.parts.published import PublishedModel, find

INDEX = "model_index.json"
Config = Mapping[str, Any]
"""Config of a pipeline component."""
_FILES = {None: INDEX, "scheduler": "scheduler_config.json", "guider": "guider_config.json"}
"""Names of configuration files that are not `config.json`, by component; None: of the pipeline."""
_WHOLE, _PIECES, _PIECE = 1 << 20, 1024, 4096
"""Bytes that the digest of a file reads at its beginning, the maximum number of further pieces, and
the bytes of each piece."""


@dataclass(frozen=True)
class LoadedPipe:
    """Pipeline that a script has loaded."""

    pipe: Any
    """Pipeline of diffusers."""
    configs: str
    """Folder with its configuration files, without weights."""


@dataclass
class Folder:
    """Location of a diffusers pipeline: its class, and its folder or its id on the hub.

    The configs of published models come from the package, so that plans contact no hub. A loaded
    pipeline that a script shares under the name `path` is used instead of files.
    """

    kind: str
    """Name of the pipeline's class, see `find_class`."""
    path: str
    skipped: Mapping[str, Any] = field(default_factory=dict)
    """Arguments to `from_pretrained` that skip components which are not needed."""
    loaded: LoadedPipe | None = field(init=False, repr=False)
    """Pipeline of a script; None if it is read from files."""

    def __post_init__(self) -> None:
        """Find the pipeline of a script."""
        self.loaded = find_object(self.path)

    @property
    def root(self) -> str:
        """Return the folder of the configuration files, or the id on the hub."""
        return self.loaded.configs if self.loaded else self.path

    @property
    def pipeline(self) -> Any:
        """Return the class of the pipeline."""
        return find_class(self.kind)

    def file(self, name: str, component: str | None = None) -> Path:
        """Return the path of a file of the folder, downloaded from the hub if needed.

        Raises:
            ValueError: The path is neither a folder with this file nor the id of a model on the
                hub.
        """
        file = Path(self.root, component or "", name)
        if file.is_file():
            return file
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", self.root):
            home = os.path.expanduser(self.root)
            hint = f": write {home}" if home != self.root else ""
            raise ValueError(
                f"policy.path {self.path!r} is neither a folder nor the id of a model{hint}"
            )
        return file_of(self.path, name, component)

    @property
    def published(self) -> PublishedModel | None:
        """Return the packaged values of a model on the hub; None for folders and other models."""
        return None if Path(self.root).exists() else find(self.root)

    def config(self, component: str | None) -> dict[str, Any]:
        """Return the config of one component; None: the content of `model_index.json`.

        Raises:
            ValueError: The path is neither a folder of this pipeline nor the id of a model on the
                hub, or a downloaded file differs from the values in the package.
        """
        if self.published and (config := self.published.config(component)):
            self._compare(self.published, component)
            return config
        name = _file_of(component)
        place = Path(component or "", name)
        if Path(self.root).exists() and not Path(self.root, place).is_file():
            raise ValueError(self.refuse(f"{place} is missing"))
        return read_object(self.file(name, component))

    def _compare(self, published: PublishedModel, component: str | None) -> None:
        """Compare the values in the package with a downloaded file, if there is one."""
        file = cached_file(self.path, _file_of(component), component)
        if file and (key := published.differing_key(component, read_object(file))):
            folder = file.parent if component is None else file.parent.parent
            raise ValueError(
                f"{file} has another {key} than pipelines/parts/published, so the plan would be "
                "wrong.\n"
                f"Set policy.path to the downloaded folder to use its values: {folder}"
            )

    def compare_downloads(self) -> None:
        """Raise ValueError if a downloaded file differs from the values in the package."""
        if published := self.published:
            for component in (None, *published.components):
                self._compare(published, component)

    def describe(self) -> list[Any]:
        """Return the names and texts of the files that a plan reads, as values for JSON."""
        if self.published:
            return [self.published.index, self.published.components]
        folders = sorted(one for one in Path(self.root).glob("*/") if one.is_dir())
        files = [Path(self.root, INDEX), *(file for one in folders for file in one.glob("*.json"))]
        texts = {
            str(file.relative_to(self.root)): file.read_text(encoding="utf-8", errors="replace")
            for file in sorted(files)
            if file.is_file() and file.name.endswith(("config.json", INDEX))
        }
        return [[one.name for one in folders], texts]

    def setting(self, name: str) -> Any:
        """Return a value of `model_index.json`, or None if the key is missing."""
        return self.config(None).get(name)

    def components(self) -> dict[str, tuple[str, str]]:
        """Return the library and class of every pipeline component, keyed by its name."""
        pairs = {k: v for k, v in self.config(None).items() if isinstance(v, list) and len(v) == 2}
        return {k: (library, kind) for k, (library, kind) in pairs.items() if isinstance(kind, str)}

    def names(self, *prefixes: str) -> list[str]:
        """Return the names of components with one of these prefixes, except skipped ones."""
        components = self.components()
        return [n for n in components if n.startswith(prefixes) and n not in self.skipped]

    def read(self, component: str, **settings: Any) -> Any:
        """Load one component to main memory."""
        library, kind = self.components()[component]
        cls = getattr(importlib.import_module(library), kind)
        return cls.from_pretrained(self.root, subfolder=component, **settings)

    def vae_on_meta(self) -> Any:
        """Build the VAE on the meta device, without weights."""
        config = self.config("vae")
        with torch.device("meta"):
            return getattr(diffusers, config["_class_name"]).from_config(config).eval()

    def refuse(self, reason: str) -> str:
        """Return the message that the path is not a folder of this pipeline."""
        if Path(self.root).is_file():
            reason = (
                "convert the file with "
                f"{self.kind}.from_single_file({self.path!r}).save_pretrained(FOLDER)"
            )
        return f"{self.path} is not a {self.kind} folder: {reason}"


def _file_of(component: str | None) -> str:
    """Return the name of the configuration file of a component."""
    return _FILES.get(component, "config.json")


def digest_files(folder: Folder, components: Iterable[str]) -> str:
    """Return a digest of the files of components, or the id and the commit on the hub.

    Of large files, equally spaced pieces are read.
    """
    if not Path(folder.path).is_dir():
        return f"{folder.path} {folder.file(INDEX).resolve().parent.name}"
    content = hashlib.sha256()
    for name in sorted(components):
        for file in sorted(Path(folder.path, name).rglob("*")):
            content.update(_sample(file) if file.is_file() else b"")
    return content.hexdigest()


def _sample(file: Path) -> bytes:
    """Return name, size, beginning and equally spaced pieces of a file."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        pieces = [f"{file.name} {size}".encode(), opened.read(_WHOLE)]
        for place in range(_WHOLE, size, max(_PIECE, (size - _WHOLE) // _PIECES)):
            opened.seek(place)
            pieces.append(opened.read(_PIECE))
    return b"".join(pieces)


def check_channels(policy: Any, transformer: Config, channels: int, kinds: str) -> None:
    """Check that a policy's network takes `channels` input channels.

    Raises:
        ValueError: It takes another number. The message ends with `kinds`, the policies to use
            instead.
    """
    if transformer["in_channels"] != channels:
        raise ValueError(
            f"the network of {policy.path} takes {transformer['in_channels']} channels, "
            f"{type(policy).__name__} provides {channels}:\n{kinds}"
        )


def check_embedded_guidance(guidance: float | None, transformer: Config, path: str) -> None:
    """Raise ValueError unless guidance is set exactly for the networks that take it as an input."""
    if transformer["guidance_embeds"] == (guidance is None):
        wanted = "a number" if transformer["guidance_embeds"] else "None"
        raise ValueError(f"embedded_guidance is {guidance}; {path} needs {wanted}")
