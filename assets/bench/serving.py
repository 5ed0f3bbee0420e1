"""Measure the overhead of a round trip to a reward server: 16 images of 256 x 256 on the loopback.

    python assets/bench/serving.py

Server and client are two processes. The model does nothing, so all time is overhead.
"""

import argparse
import json
import socket
import subprocess
import sys
import time

import torch

from flowalign.types import MediaBatch, RewardModel, RewardOutput, RewardSpec
from reward_models.wrappers.out_of_process import RemoteReward


class Nothing(RewardModel):
    """Reward that scores everything 0."""

    def __init__(self) -> None:
        self.spec = RewardSpec("nothing", ("nothing",), "any", (0.0, 0.0), "Apache-2.0")

    def score(self, batch: MediaBatch) -> RewardOutput:
        """Return zeros."""
        return RewardOutput.build(self.spec, torch.zeros(len(batch), 1))


SERVE = """
import sys, uvicorn
sys.path.insert(0, {folder!r})
from serving import Nothing
from flowalign.rewards.batching import Batcher, Limits
from flowalign.rewards.reward_server import Service, application
limits = Limits(max_wait_ms={wait})
app = application(Service([Batcher(Nothing(), limits)], limits))
uvicorn.run(app, port={port}, log_level="error")
"""


def measure(pixels: str, wait: float, repeats: int) -> dict[str, float]:
    """Return the median and the minimum milliseconds of a round trip."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = __file__.rpartition("/")[0]
    code = SERVE.format(folder=folder, port=port, wait=wait)
    server = subprocess.Popen([sys.executable, "-c", code])
    try:
        reward = RemoteReward(f"http://127.0.0.1:{port}", ["nothing"], pixels=pixels)
        for _ in range(120):
            try:
                reward.load()
                break
            except ValueError:
                time.sleep(0.5)
        media = torch.rand(16, 1, 3, 256, 256)
        batch = MediaBatch(media, [f"prompt {i}" for i in range(16)])
        times = []
        for _ in range(repeats + 5):
            start = time.perf_counter()
            reward.score(batch)
            times.append(1000 * (time.perf_counter() - start))
        times = sorted(times[5:])
    finally:
        server.terminate()
        server.wait()
    return {"median_ms": round(times[len(times) // 2], 2), "best_ms": round(times[0], 2)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument(
        "--wait", type=float, default=0.0, help="ms that a request waits for further ones"
    )
    args = parser.parse_args()
    for pixels in ("8bit", "float32"):
        print(json.dumps({"pixels": pixels} | measure(pixels, args.wait, args.repeats)))  # noqa: T201
