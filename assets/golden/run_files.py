"""Keep the run files of version 0.1 as one JSON file: the settings as authored, by path.

    python assets/golden/run_files.py FOLDER     # a checkout of version 0.1

Writes `run_files_0.1.json` beside this script: one line for each training run file.
"""

import json
import sys
from pathlib import Path

import yaml

TARGET = Path(__file__).with_name("run_files_0.1.json")
PATTERNS = ("configs/*.yaml", "configs/credit/*/*.yaml", "configs/preference/**/*.yaml")


def settings(folder: Path) -> dict[str, dict]:
    """Return the settings of each training run file below a folder, by its path from there."""
    found = sorted({file for pattern in PATTERNS for file in folder.glob(pattern)})
    return {file.relative_to(folder).as_posix(): yaml.safe_load(file.read_text()) for file in found}


def compact(value: object) -> str:
    """Return JSON without blanks."""
    return json.dumps(value, separators=(",", ":"))


def main() -> None:
    """Write one line per file, so that a difference shows which file it is in."""
    lines = [f"{compact(k)}:{compact(v)}" for k, v in settings(Path(sys.argv[1])).items()]
    TARGET.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
