"""Measure flowalign's speed claims on one GPU in nine minutes.

`python -m assets.bench.gpu [--parts parity,ratio] [--limit 60] [--total 540] [--out FILE]`

Networks have random weights in the sizes of SD3.5-M and Wan 2.1 1.3B; nothing is downloaded. Each
part runs in a separate process. If a part fails or times out, its message and its earlier
measurements are kept. The results are written to one JSON file after each part, and printed as a
table, next to those of `gpu_h100.json`. `--resume` runs the parts that the file lacks. Without a
GPU the same parts run on the CPU on tiny networks, which only tests that they run.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RECORDED = Path(__file__).with_name("gpu_h100.json")
"""Measurements on an H100 with flowalign of November 2026 and torch 2.11."""


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the selected parts one after the other, and return the results."""
    import torch

    from assets.bench.gpu_parts import PARTS
    from assets.bench.gpu_sizes import SIZES, build_networks

    args = _arguments(list(PARTS), list(SIZES), argv)
    size = args.size or ("full" if torch.cuda.is_available() else "small")
    found: dict[str, Any] = _header(size, SIZES[size], vars(args))
    if args.resume and args.out.exists():
        earlier = json.loads(args.out.read_text(encoding="utf-8"))
        if (earlier["size"]["name"], earlier["machine"]) != (size, found["machine"]):
            raise SystemExit(f"{args.out} has another size or machine: choose another --out")
        found["parts"] = {p: one for p, one in earlier["parts"].items() if one["state"] == "done"}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="flowalign-gpu-") as folder:
        build_networks(SIZES[size], Path(folder))
        torch.cuda.empty_cache()  # for the processes of the parts
        for part in [one for one in args.parts if one not in found["parts"]]:
            left = args.total - (time.monotonic() - begin)
            found["parts"][part] = run_part(part, size, folder, min(args.limit, left))
            found["seconds"] = time.monotonic() - begin
            save(found, args.out)
    print_table(found)
    return found


def run_part(part: str, size: str, folder: str, limit: float) -> dict[str, Any]:
    """Run one part in a separate process, and return its state and its figures."""
    if limit < 1:
        return {"state": "not started: the time of all parts was up", "figures": {}}
    file = Path(folder) / f"{part}.jsonl"
    command = [sys.executable, "-m", "assets.bench.gpu_parts", part, size, folder, str(file)]
    begin = time.monotonic()
    try:
        done = subprocess.run(
            command,
            timeout=limit,
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        last = (done.stderr.strip().splitlines() or [""])[-1]
        state = "done" if done.returncode == 0 else f"failed ({done.returncode}): {last[:500]}"
    except subprocess.TimeoutExpired:
        state = f"stopped after {limit:.0f} seconds"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    seconds = time.monotonic() - begin
    return {"state": state, "seconds": seconds, "figures": dict(json.loads(line) for line in lines)}


def save(found: dict[str, Any], out: Path) -> None:
    """Write the file under a temporary name, and rename it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_suffix(".part")
    temporary.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    temporary.replace(out)


def print_table(found: dict[str, Any]) -> None:
    """Print every figure, by part, and its quotient with the recorded one."""
    from flowalign.utils.console import table

    recorded, rows = json.loads(RECORDED.read_text(encoding="utf-8"))["parts"], {}
    for part, result in found["parts"].items():
        rows[part] = result["state"]
        for label, figures in result["figures"].items():
            before = recorded.get(part, {}).get("figures", {}).get(label, {})
            for name, value in figures.items():
                shown = f"{value:.4g}" if isinstance(value, float) else str(value)
                compared = found["size"]["name"] == "full" and before.get(name)
                ratio = f" ({value / compared:.2f} of the recorded)" if compared else ""
                rows[f"{part}, {label}: {name}"] = shown + ratio
    table(str(found["machine"]["gpu"]), rows)


def _arguments(parts: list[str], sizes: list[str], argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--parts", default=",".join(parts), help=f"comma-separated parts: {', '.join(parts)}")
    add("--limit", type=float, default=60.0, help="maximum seconds per part (default: 60)")
    add("--total", type=float, default=540.0, help="maximum seconds in total (default: 540)")
    add("--size", choices=sizes, help="default: full with a GPU, else small")
    add("--out", type=Path, default=Path("runs/bench_gpu.json"))
    add("--resume", action="store_true", help="keep the finished parts of --out")
    args = parser.parse_args(argv)
    args.parts = args.parts.split(",")
    if unknown := sorted({*args.parts} - {*parts}):
        parser.error(f"--parts has {unknown[0]}; allowed are {', '.join(parts)}")
    return args


def _header(name: str, size: Any, args: dict[str, Any]) -> dict[str, Any]:
    from flowalign.utils.machine import machine, versions

    git = ["git", "-C", str(ROOT)]
    commit, changed = (
        subprocess.run([*git, *words], capture_output=True, text=True).stdout.strip()
        for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "-uno"))
    )
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": (commit or "unknown") + (" with changes" if changed else ""),
        "machine": machine(),
        "libraries": versions(),
        "settings": {k: str(v) for k, v in args.items()},
        "size": {"name": name, **dataclasses.asdict(size)},
        "parts": {},
    }


if __name__ == "__main__":
    main()
