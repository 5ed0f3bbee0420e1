"""The wheel holds every file that its run files need."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flowalign.utils.strict_yaml import read_yaml

ROOT = Path(__file__).parents[2]
WHEEL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"][
    "wheel"
]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


def texts(content: Any) -> Iterator[str]:
    if isinstance(content, dict):
        for value in content.values():
            yield from texts(value)
    elif isinstance(content, list):
        for value in content:
            yield from texts(value)
    elif isinstance(content, str):
        yield content


def needed(content: Any) -> set[str]:
    """Return the files and folders of the repository that a run file names."""
    return {text for text in texts(content) if text.startswith(("assets/", "configs/"))}


def is_shipped(path: str, rules: list[str]) -> bool:
    return any(path == rule or path.startswith(f"{rule}/") for rule in rules)


def test_what_a_shipped_run_file_names_is_shipped():
    for file in CONFIGS:
        assert is_shipped(file.relative_to(ROOT).as_posix(), WHEEL["only-include"])
        for path in needed(read_yaml(file)):
            assert (ROOT / path).exists(), f"{file}: {path}"
            assert is_shipped(path, WHEEL["only-include"]), f"{file}: {path}"


def test_no_shipped_file_needs_a_tracker_that_a_base_install_lacks():
    named = {file.name: content.get("trackers", []) for file, content in _mappings()}
    assert {name: trackers for name, trackers in named.items() if trackers} == {}


def _mappings() -> Iterator[tuple[Path, dict[str, Any]]]:
    for file in CONFIGS:
        if isinstance(content := read_yaml(file), dict):
            yield file, content


def test_shipped_files_lie_where_the_package_looks_for_them():
    assert WHEEL["sources"] == {
        "assets": "flowalign/bundled/assets",
        "configs": "flowalign/bundled/configs",
    }
    for rule in WHEEL["only-include"]:
        assert (ROOT / rule).is_dir(), rule


def test_files_outside_the_rules_are_found():
    """A run file of the video model named these when the wheel lacked them."""
    content = {"policy": {"path": "assets/shapes_video/wan"}, "trackers": ["a", "assets/b/c"]}
    assert needed(content) == {"assets/shapes_video/wan", "assets/b/c"}
    assert not is_shipped("assets/shapes_video/wan", ["assets/shapes", "configs"])
    assert is_shipped("assets/shapes_video/wan", ["assets/shapes_video"])


GATED = (
    *("stabilityai/stable-diffusion-3", "black-forest-labs/FLUX.1-dev"),
    *("black-forest-labs/FLUX.1-Kontext-dev", "black-forest-labs/FLUX.1-Fill-dev"),
    "black-forest-labs/FLUX.2-dev",
)
"""Beginnings of the ids of models for which the hub asks to accept a licence."""


def test_run_files_say_that_a_model_is_gated():
    lines = {line.strip() for file in CONFIGS for line in file.read_text().splitlines()}
    named = {line for line in lines if line.startswith(tuple(f"path: {one}" for one in GATED))}
    assert len(named) >= len(GATED)
    assert {line for line in named if "# gated: accept its licence on the hub" not in line} == set()
