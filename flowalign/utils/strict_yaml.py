"""Read user-written YAML files; ambiguous or excessively large content is rejected."""

import re
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from typing_extensions import override

from flowalign.utils.errors import ConfigError
from flowalign.utils.files import bundled

_MOST_BYTES, _MOST_VALUES, _DEEPEST = 1_000_000, 20_000, 50
"""Limits of a file: bytes, values and nesting depth. Values of an alias count at each use."""


def read_yaml(path: Path, name: str | None = None) -> Any:
    """Read one file; messages use `name`, or the path if it is None.

    Raises:
        ConfigError: The file is missing, not text, not YAML, has a key twice, or exceeds a limit.
    """
    name = name or str(path)
    if path.is_dir():
        raise ConfigError(f"{name} is a folder, not a YAML file")
    if not path.is_file():
        raise ConfigError(f"{name} does not exist (looked in {Path.cwd()})")
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise yaml.YAMLError(f"it is larger than {_MOST_BYTES:,} bytes")
        return parse_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or a number like 0x_
        what = " ".join(str(error).replace(' in "<unicode string>",', " in").split())
        raise ConfigError(f"{name} cannot be read as YAML: {what[:300]}") from error
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}") from error


def parse_yaml(text: str) -> Any:
    """Return the parsed content of a text; raise yaml.YAMLError for rejected content."""
    return deepcopy(_parse_once(text))


def dump_yaml(content: Any) -> str:
    """Return settings as YAML in the order given, by libyaml where PyYAML has it."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


@lru_cache(maxsize=512)
def _parse_once(text: str) -> Any:
    return yaml.load(text, _Loader)


class _Loader(yaml.SafeLoader):
    """Loader with limits and unique keys, and the number syntax of the command line (1e-3)."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (declared so by its base)
        letter: [r for r in resolvers if not r[0].endswith((":float", ":timestamp"))]
        for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._values, self._depth, self._deepest = 0, 0, 0
        self._sizes: dict[yaml.Node, tuple[int, int]] = {}
        """Number of values in a node, including itself, and the number of levels below it."""

    @override
    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Count the values and levels of a node after its aliases are expanded."""
        event, before, outside = self.peek_event(), self._values, self._deepest
        self._depth += 1
        self._deepest = self._depth
        self._refuse_excess(event)
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag:
            raise _refused(f"tag {event.tag!r} is not allowed", event)
        node = super().compose_node(parent, index)
        assert node is not None  # None is only possible without a parent event
        if not isinstance(event, yaml.AliasEvent):
            self._values += 1
            self._sizes[node] = self._values - before, self._deepest - self._depth
        elif node in self._sizes:
            self._values += self._sizes[node][0]
            self._deepest += self._sizes[node][1]
        else:
            raise _refused(f"alias {event.anchor!r} refers to itself", event)
        self._refuse_excess(event)
        self._depth -= 1
        self._deepest = max(self._deepest, outside)
        return node

    def _refuse_excess(self, event: yaml.Event) -> None:
        if self._deepest > _DEEPEST:
            raise _refused(f"values are nested more than {_DEEPEST} deep", event)
        if self._values > _MOST_VALUES:
            raise _refused(f"it holds more than {_MOST_VALUES:,} values, aliases followed", event)

    @override
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Raise YAMLError for a mapping with a repeated key, because YAML would keep the last."""
        node = super().compose_mapping_node(anchor)
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            merges = key.tag == "tag:yaml.org,2002:merge"
            name, line = key.value if merges else self.construct_object(key), _line(key)
            if name in lines:
                raise yaml.YAMLError(
                    f"key {key.value!r} is given twice, in lines {lines[name]} and {line}"
                )
            lines[name] = line
        return node

    @override
    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Raise YAMLError for 010, which is 8, and 1:30, which is 90."""
        if re.fullmatch(r"[-+]?0[0-9_]+|.*:.*", node.value):
            raise yaml.YAMLError(
                f"{node.value} (line {_line(node)}) is {super().construct_yaml_int(node)} in YAML: "
                "write that number, or quote it as a text"
            )
        return super().construct_yaml_int(node)


def _refused(what: str, event: yaml.Event) -> yaml.YAMLError:
    return yaml.YAMLError(f"{what} (line {_line(event)})")


def _line(place: yaml.Node | yaml.Event) -> int:
    return place.start_mark.line + 1


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?$|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"
        r"|[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)


def read_mapping(config: str) -> dict[str, Any]:
    """Read a YAML file that must contain a mapping with unique keys.

    Raises:
        ConfigError: The file is missing or has other content.
    """
    path = Path(bundled(config))
    if not path.exists():
        raise ConfigError(f"run file {config!r} does not exist (looked in {Path.cwd()})")
    content = read_yaml(path, config)
    if not isinstance(content, dict):
        raise ConfigError(f"{config} must hold a mapping of settings, not {type(content).__name__}")
    return content
