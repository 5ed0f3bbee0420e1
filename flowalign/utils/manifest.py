"""Record the settings of the files in a folder, so that only the same command resumes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowalign.utils.files import write_text


def agree(manifest: Path, settings: Mapping[str, Any], maker: str) -> None:
    """Write the settings of a folder, after comparing them with the settings of an earlier run.

    Raises:
        ValueError: A setting differs, or the folder has other files; `maker` is the command's name.
    """
    compare(manifest, settings, maker)
    write_text(manifest, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def compare(manifest: Path, settings: Mapping[str, Any], maker: str) -> None:
    """Raise ValueError for a folder that was made with other settings or has other files."""
    folder = manifest.parent
    if not manifest.exists():
        found = {path.name for path in folder.glob("*") if path.is_file()}
        if any(not name.startswith(".") for name in found):
            raise ValueError(f"{folder} holds files that {maker} did not write")
        return
    earlier = json.loads(manifest.read_text(encoding="utf-8"))
    differs = [name for name in settings if settings[name] != earlier.get(name)]
    if differs:
        was, now = (str(side.get(differs[0])) for side in (earlier, settings))
        raise ValueError(
            f"{folder} was made with other settings: {', '.join(differs)} differ;\n"
            f"{differs[0]} was {was[:200]!r}, now {now[:200]!r}\n"
            "choose another --out, or the earlier settings"
        )
