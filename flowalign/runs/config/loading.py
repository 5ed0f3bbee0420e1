"""Compose run files from parts, and turn them and the command line into a typed `Run`.

A method file holds only the few settings in which it differs from its baseline. A resolved file, as
in each run directory, holds all values and needs no other file.

Files are merged left to right by the rules of `flowalign.utils.typed_settings`. With `extends` a
file names the files that it is layered on, one level deep.

jsonargparse builds the run: unions and the refusal of unknown keys work without extra code, and a
component is named by its dotted path, so there is no registry. `--help` takes 0.19 s of CPU; Hydra
took 0.40 s, and tyro needs a separate YAML loader.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flowalign.runs.config.run import Run
from flowalign.utils.errors import ConfigError, convert_value_errors
from flowalign.utils.files import bundled
from flowalign.utils.imports import pause_garbage_collection
from flowalign.utils.strict_yaml import read_mapping
from flowalign.utils.typed_settings import ARGUMENTS, apply_options, build, join_values, merge

_EXTENDS, _OUTPUT = "extends", "output_dir"
FROM_NAMES = "names of the files"
"""Origin of an `output_dir` that no file sets."""


@dataclass(frozen=True)
class Composition:
    """Merged settings of the run files of one command."""

    values: dict[str, Any]
    files: dict[str, Any]
    """The same tree with the file that set each leaf."""

    @property
    def origins(self) -> dict[str, str]:
        """Return the file of each leaf, by dotted key such as `recipe.init_args.sampling.eta`."""
        return dict(_iterate_leaves(self.files))

    def under(self, overlay: Mapping[str, Any], file: str) -> "Composition":
        """Return both trees with one more file laid over them."""
        return Composition(
            merge(self.values, overlay, file),
            merge(self.files, _replace_leaves(overlay, file), file),
        )


def compose(configs: Sequence[str]) -> Composition:
    """Merge run files left to right, and record which file set each leaf.

    Raises:
        ConfigError: a file cannot be read or merged, or changes nothing.
    """
    if not configs:
        raise ConfigError("no run file was given: name one, such as configs/shapes.yaml")
    composed = Composition({}, {})
    for place, config in enumerate(configs):
        before = composed.values
        composed = _with_file(composed, config)
        if place and composed.values == before:
            earlier = ", ".join(configs[:place])
            raise ConfigError(f"{config} changes nothing of {earlier}: leave it out")
    if _OUTPUT not in composed.values:
        named = {_OUTPUT: f"runs/{'-'.join(Path(config).stem for config in configs)}"}
        composed = composed.under(named, FROM_NAMES)
    return composed


def find_origin(origins: Mapping[str, str], key: str) -> str | None:
    """Find the file that set a dotted key, written with or without `init_args`.

    A key inside a list has the origin of the list. The key of a mapping has an origin if one file
    set all of it. The result is None if no file set the key, or if several did.
    """
    wanted = _split_key(key)
    by_key = {_split_key(leaf): file for leaf, file in origins.items()}
    for length in range(len(wanted), 0, -1):
        if wanted[:length] in by_key:
            return by_key[wanted[:length]]
    below = {file for leaf, file in by_key.items() if leaf[: len(wanted)] == wanted}
    return below.pop() if len(below) == 1 else None


def _with_file(composed: Composition, config: str) -> Composition:
    """Add one file of the command line, after the files that it extends."""
    content = read_mapping(config)
    if _EXTENDS not in content:
        return composed.under(content, config)
    named = content.pop(_EXTENDS)
    bases = [named] if isinstance(named, str) else named
    if not isinstance(bases, list) or not bases or not all(isinstance(b, str) for b in bases):
        raise ConfigError(f"{config}: extends is {named!r}; it must be a path or a list of paths")
    for base in bases:
        composed = composed.under(_read_base(base, config), base)
    result = composed.under(content, config)
    if result.values == composed.values:
        bases = ", ".join(bases)
        raise ConfigError(f"{config} changes nothing of what it extends: give {bases}")
    return result


def _read_base(base: str, config: str) -> dict[str, Any]:
    """Read a file that another file extends; it must not extend any itself."""
    with convert_value_errors(f"{config} extends a file that cannot be used:\n"):
        content = read_mapping(base)
    if _EXTENDS in content:
        raise ConfigError(
            f"{config} extends {base}, which extends {content[_EXTENDS]} itself.\n"
            f"Only one level is allowed: list all base files in {config}."
        )
    return content


def _replace_leaves(content: Any, leaf: str) -> Any:
    """Return the same tree with `leaf` instead of every value that is no mapping."""
    if not isinstance(content, dict):
        return leaf
    return {key: _replace_leaves(value, leaf) for key, value in content.items()}


def _iterate_leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _iterate_leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _split_key(key: str) -> tuple[str, ...]:
    return tuple(part for part in key.split(".") if part != ARGUMENTS)


@dataclass(frozen=True)
class LoadedRun:
    """Run, its resolved settings, and the origin of each setting."""

    run: Run
    """Run with all components built."""
    text: str
    """Complete settings as YAML. Run directories store this text, and it can be loaded again."""
    origins: Mapping[str, str]
    """File, or "command line", that set each dotted key; a key that is absent has its default."""

    def annotate(self) -> str:
        """Return the settings as YAML, each with its origin as a comment."""
        text = self.text
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        for place, key in reversed([*_find_ends(yaml.compose(text, loader))]):
            origin = repr(find_origin(self.origins, key) or "default")[1:-1]  # one line
            end = text.index("\n", place)
            text = f"{text[:end]}  # {origin}{text[end:]}"
        return text


def _find_ends(settings: yaml.MappingNode, above: str = "") -> Iterator[tuple[int, str]]:
    """Yield the end and the dotted key of each setting; a list in lines ends with its key."""
    for key, value in settings.value:
        name = f"{above}.{key.value}".lstrip(".")
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from _find_ends(value, name)
        else:
            in_lines = isinstance(value, yaml.SequenceNode) and value.value
            yield (key if in_lines else value).end_mark.index, name


def load(configs: str | Sequence[str], overrides: Sequence[str] = ()) -> tuple[Run, str]:
    """Load one or several run files with overrides such as `--recipe.sampling.eta 0.5`.

    Returns the run and its complete settings as YAML.

    Raises:
        ConfigError: A setting is invalid. The message has at most five lines; it names the key or
            value and the allowed values.
    """
    loaded = load_with_origins(configs, overrides)
    return loaded.run, loaded.text


def load_with_origins(configs: str | Sequence[str], overrides: Sequence[str] = ()) -> LoadedRun:
    """Load a run with the origin of every setting. See `load`."""
    names = [configs] if isinstance(configs, str) else list(configs)
    composed, options = compose(names), join_values(overrides)
    keys = [option[2:].partition("=")[0] for option in options]
    origins = {**composed.origins, **dict.fromkeys(keys, "command line")}
    folders = [Path(bundled(name)).parent for name in names]

    def locate(key: str) -> str:
        return find_origin(origins, key) or " ".join(names)

    with pause_garbage_collection():  # the settings name classes, whose modules are imported here
        values = apply_options(Run, composed.values, options)
        run, text = build(Run, values, locate, folders)
    return LoadedRun(run, text, origins)
