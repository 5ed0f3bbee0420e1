"""Check and train every method on every model, or a part of them, and write the results.

`python -m tests.matrix.run --out matrix.jsonl [--checks] [--models a,b] [--methods c,d] [--shard
0/4]` writes one line per combination. `--checks` trains none. A file that exists is continued.
"""

import argparse
import json
import os
import tempfile
from collections import Counter
from pathlib import Path

import torch

from tests.fixtures.matrix import METHODS, MODELS, Matrix


def main() -> None:
    """Run the combinations that the file lacks, and print the number of each state."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checks", action="store_true")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--shard", default="0/1")
    args = parser.parse_args()
    out, (shard, shards) = args.out.absolute(), map(int, args.shard.split("/"))
    lines = out.read_text().splitlines() if out.exists() else []
    done = {(row["model"], row["method"]): row["state"] for row in map(json.loads, lines)}
    pairs = [(a, b) for b in args.methods.split(",") for a in args.models.split(",")][shard::shards]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        matrix = Matrix(Path(folder))
        for model, method in pairs:
            if (model, method) not in done:
                result = matrix.result(model, method, not args.checks)
                done[model, method] = result.state
                with out.open("a") as file:
                    file.write(json.dumps(vars(result)) + "\n")
    print(dict(Counter(done.values())))  # noqa: T201


if __name__ == "__main__":
    main()
