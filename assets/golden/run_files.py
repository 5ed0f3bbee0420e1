"""Keep the run files of version 0.1 as one JSON file: the settings as authored, by path.

    git worktree add runs/old v0.1
    python assets/golden/run_files.py runs/old

Writes `run_files_0.1.json` beside this script: one line for each training run file.
"""

import json
import sys
from pathlib import Path

import yaml

TARGET = Path(__file__).with_name("run_files_0.1.json")
PATTERNS = ("configs/*.yaml", "configs/credit/*/*.yaml", "configs/preference/**/*.yaml")


def settings(folder: Path) -> dict[str, dict]:
    """The settings of every training run file below a folder, by its path from there."""
    found = sorted({file for pattern in PATTERNS for file in folder.glob(pattern)})
    return {file.relative_to(folder).as_posix(): yaml.safe_load(file.read_text()) for file in found}


def main() -> None:
    """Write one line a file, so that a difference shows which."""
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in settings(Path(sys.argv[1])).items()]
    TARGET.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
