"""Measure time and memory of `flowalign pairs` on a score table with a given number of pairs.

`python assets/bench/pairs.py [--pairs 100000] [--media 4] [--rule gap]`

Every prompt has `--media` images of 8 x 8 pixels in separate files, so that the time includes the
checks for existing files, equal files and equal sizes. Prints seconds and peak memory of the
command, which runs in a separate process.
"""

import argparse
import json
import math
import random
import resource
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

import pyarrow
from pyarrow import parquet

SIDE = 8


def png(draw: random.Random) -> bytes:
    """Return a PNG image of random colours."""
    rows = b"".join(b"\0" + draw.randbytes(3 * SIDE) for _ in range(SIDE))
    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )


def table(folder: Path, prompts: int, media: int) -> Path:
    """Write a table as `flowalign score` does, and its images; return the table's path."""
    draw = random.Random(0)
    rows = []
    for k in range(prompts):
        (folder / f"{k // 1000}").mkdir(exist_ok=True)
        for i in range(media):
            path = folder / f"{k // 1000}" / f"{k}-{i}.png"
            path.write_bytes(png(draw))
            rows.append(
                {
                    "record": f"{k}",
                    "medium": i,
                    "prompt": f"prompt number {k}",
                    "path": str(path),
                    "reason": None,
                    "fingerprint": "bench",
                    "beauty": draw.gauss(5, 1),
                    "beauty_valid": True,
                    "alignment": draw.gauss(0, 1),
                    "alignment_valid": True,
                }
            )
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "scores.parquet")
    return folder / "scores.parquet"


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=100_000)
    parser.add_argument("--media", type=int, default=4)
    parser.add_argument("--rule", choices=("gap", "best_worst"), default="gap")
    args = parser.parse_args()
    per_prompt = math.comb(args.media, 2) if args.rule == "gap" else 1
    with tempfile.TemporaryDirectory() as folder:
        path = table(Path(folder), math.ceil(args.pairs / per_prompt), args.media)
        command = [
            sys.executable,
            "-m",
            "flowalign",
            "pairs",
            str(path),
            "--rule",
            args.rule,
            "--weights",
            "beauty=1",
            "alignment=0.5",
            "--stages",
            "5",
            "--out",
            f"{folder}/pairs",
        ]
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
        summary = json.loads((Path(folder) / "pairs" / "summary.json").read_text())
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures = {
        "pairs": summary["pairs"],
        "media": summary["media"],
        "seconds": round(seconds, 1),
        "processor_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_mebibytes": round(usage.ru_maxrss / 1024),
        "dropped_pairs": summary["dropped_pairs"],
    }
    print(json.dumps(figures, indent=2))  # noqa: T201


if __name__ == "__main__":
    main()
