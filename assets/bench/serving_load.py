"""Measure a reward server under 64 clients while hostile clients send invalid requests.

    PYTHONPATH=. python assets/bench/serving_load.py --seconds 120

The server is `flowalign serve-reward` in a separate process, and so are the hostile clients. The
well-behaved clients are threads of four processes, each sending its next request immediately.
"""

import argparse
import json
import multiprocessing
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import torch

from tests.fixtures.served import Hostile, memory_mb, serving, well_behaved

LIMITS = (
    *("--max_request_mb=8", "--max_image_mp=1", "--max_request_mp=2"),
    *("--max_held_mb=256", "--read_timeout=5"),
)


def clients(url: str, seeds: range, until: float) -> tuple[list[float], list[str]]:
    """Run well-behaved clients in parallel; return all request seconds, and all errors."""
    torch.set_num_threads(1)
    going_on = lambda: time.time() < until  # noqa: E731
    with ThreadPoolExecutor(len(seeds)) as threads:
        parts = list(threads.map(lambda seed: well_behaved(url, seed, going_on), seeds))
    return [s for seconds, _ in parts for s in seconds], [w for _, wrong in parts for w in wrong]


def attack(url: str, count: int, until: float) -> tuple[Counter[str], list[str]]:
    """Run hostile clients in parallel; return the counts of requests, and wrongly accepted ones."""
    stopped = threading.Event()
    threading.Timer(until - time.time(), stopped.set).start()
    hostile = [Hostile(url, seed, stopped) for seed in range(count)]
    with ThreadPoolExecutor(max(count, 1)) as threads:
        list(threads.map(Hostile.run, hostile))
    return sum((h.sent for h in hostile), Counter()), [w for h in hostile for w in h.wrong]


def measure(
    seconds: float, num_clients: int, num_hostile: int, model_ms: float
) -> dict[str, object]:
    """Return latencies in seconds, losses, and the server's memory in MiB."""
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder) / "rewards.yaml", *LIMITS, seconds=model_ms / 1000) as (url, pid),
        ProcessPoolExecutor(5, spawn) as processes,
    ):
        list(processes.map(time.sleep, [1.0] * 5))  # start and import before the timing
        before, until = memory_mb(pid), time.time() + seconds
        groups = [range(i, num_clients, 4) for i in range(4)]
        asked = [processes.submit(clients, url, group, until) for group in groups]
        attacks = processes.submit(attack, url, num_hostile, until)
        results, (sent, unrefused) = [future.result() for future in asked], attacks.result()
        after, peak = memory_mb(pid), memory_mb(pid, "VmHWM")
    times = sorted(s for some, _ in results for s in some)
    lost = [why for _, some in results for why in some]
    median, p99 = times[len(times) // 2], times[int(len(times) * 0.99)]
    return {
        "clients": num_clients,
        "model_ms": model_ms,
        "seconds": seconds,
        "requests": len(times),
        "lost": len(lost),
        "first_lost": lost[:1],
        "median_s": round(median, 4),
        "p99_s": round(p99, 4),
        "p99_per_median": round(p99 / median, 2),
        "max_s": round(times[-1], 3),
        "hostile": dict(sent),
        "not_refused": unrefused[:3],
        "memory_mb": [round(x) for x in (before, after, peak)],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--hostile", type=int, default=4)
    parser.add_argument("--model_ms", type=float, default=50.0, help="milliseconds per model call")
    args = parser.parse_args()
    result = measure(args.seconds, args.clients, args.hostile, args.model_ms)
    print(json.dumps(result))  # noqa: T201
