"""Write the setting that a probe recommends as a run file that is layered on the others."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from flowalign.runs.config import load_with_origins
from flowalign.studies.probe.probe_settings import Setting, remove_place
from flowalign.utils.errors import ConfigError
from flowalign.utils.files import atomic_write

_DESCENDED = ("recipe", "policy")
"""Components that every run file names, so an overlay can change single arguments."""


def write_overlay(
    path: Path, configs: Sequence[str], best: Setting, step_weight: list[float] | None
) -> None:
    """Write all settings in which the run with these step weights differs from the run files.

    The new file is loaded after the run files to check that it gives the probed settings.

    Raises:
        ConfigError: There is no difference, or the run files are not complete by themselves.
    """
    wanted = remove_place(best.loaded)
    if step_weight:
        wanted["recipe"]["init_args"]["step_weight"] = step_weight
    content = difference(remove_place(load_with_origins(configs)), wanted)
    if not content:
        raise ConfigError(
            f"--overlay: no probed setting is better than {' '.join(configs)}, "
            "so there is nothing to write"
        )
    text = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=100)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial:
        partial.write_text(f"# {best.name}, of flowalign probe\n{text}", encoding="utf-8")
        if remove_place(load_with_origins([*configs, str(partial)])) != wanted:
            raise ConfigError(
                f"--overlay: no file after {' '.join(configs)} gives the settings of {best.name}; "
                "move the command line's settings into a run file first"
            )


def difference(base: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overlay that turns `base` into `wanted`; most components are replaced whole."""
    found: dict[str, Any] = {}
    for key, value in wanted.items():
        before = base.get(key)
        if value == before:
            continue
        found[key] = value
        if isinstance(value, dict) and isinstance(before, dict) and before:
            same = value.get("class_path") == before.get("class_path")
            if same and ("class_path" not in value or key in _DESCENDED):
                found[key] = difference(before, value)
    return found
