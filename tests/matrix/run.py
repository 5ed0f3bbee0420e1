"""Check and train every method on every model, or a part of them, and write the results.

`python -m tests.matrix.run --out matrix.jsonl [--checks] [--models a,b] [--methods c,d] [--shard
0/4] [--table FILE]` writes one line per combination. `--checks` trains none. A file that exists is
continued. `--table` writes the states as CSV, a row per method and a column per model, and labels
the run files of methods and models by them.
"""

import argparse
import csv
import json
import os
import random
import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch

from tests.fixtures.matrix import METHODS, MODELS, Matrix
from tests.fixtures.run_files import CONFIGS


def main() -> None:
    """Run the combinations that the file lacks, and print the number of each state."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checks", action="store_true")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--table", type=lambda name: Path(name).absolute())
    args = parser.parse_args()
    out, (shard, shards) = args.out.absolute(), map(int, args.shard.split("/"))
    lines = out.read_text().splitlines() if out.exists() else []
    done = {(row["model"], row["method"]): row["state"] for row in map(json.loads, lines)}
    pairs = [(a, b) for b in args.methods.split(",") for a in args.models.split(",")]
    random.Random(0).shuffle(pairs)  # so that a part of a long run covers all models and methods
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        matrix = Matrix(Path(folder))
        for model, method in pairs[shard::shards]:
            state = done.get((model, method))
            if state is None or (state in ("accepted", "failed") and not args.checks):
                result = matrix.result(model, method, not args.checks)
                done[model, method] = result.state
                with out.open("a") as file:
                    file.write(json.dumps(vars(result)) + "\n")
    print(dict(Counter(done.values())))  # noqa: T201
    if args.table:
        known = read_table(args.table) | done
        write_table(args.table, known)
        write_labels(known)


def read_table(file: Path) -> dict[tuple[str, str], str]:
    """Return the state of each combination of (model, method) in a table; empty without one."""
    if not file.exists():
        return {}
    with file.open(newline="") as table:
        header, *rows = csv.reader(table)
    return {
        (a, b): state for b, *states in rows for a, state in zip(header[1:], states, strict=True)
    }


def write_table(file: Path, states: Mapping[tuple[str, str], str]) -> None:
    """Write the state of each combination of (model, method) as CSV."""
    rows = [["method", *MODELS], *([a, *(states[b, a] for b in MODELS)] for a in METHODS)]
    with file.open("w", newline="") as table:
        csv.writer(table, lineterminator="\n").writerows(rows)


def write_labels(states: Mapping[tuple[str, str], str]) -> None:
    """Label methods and models as step tested if a combination trained; runs keep their label."""
    trained = {pair for pair, state in states.items() if state == "trained"}
    tested = {f"models/{a}" for a, _ in trained} | {f"methods/{b}" for _, b in trained}
    for name in [*(f"models/{a}" for a in MODELS), *(f"methods/{b}" for b in METHODS)]:
        file = CONFIGS / f"{name}.yaml"
        label = "step tested" if name in tested else "checked only"
        text = file.read_text()
        file.write_text(re.sub(r"\A# \[(step tested|checked only)\]", f"# [{label}]", text))


if __name__ == "__main__":
    main()
