"""Measure what announcements of all-gathers cost, and how often they are needed.

    PYTHONPATH=. python assets/bench/announcements.py
    PYTHONPATH=. python assets/bench/announcements.py --count [--recipe.micro_batch 4 ...]

Two processes train configs/shapes.yaml with sharded weights, 4 prompts of 8 samples and one thread
each. Every second step runs as plain FSDP2, without announcements. It prints, per process, the CPU
and wall seconds of the steps with announcements relative to the neighbouring ones without, and the
CPU time of one announcement.

With --count, weights are whole, and a micro-batch is one group of 8 samples. It prints in how many
steps the processes call the network equally often. They get equal numbers of prompts, but groups
without a difference in reward are not trained.
"""

import os
import runpy
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from math import sqrt
from typing import Any

import torch.distributed as dist

from flowalign.distributed.collective_scheduler import CollectiveScheduler, _reduce_min
from flowalign.distributed.elastic import run_together
from flowalign.distributed.launch import Launch
from flowalign.training.policy_gradient.policy_gradient_loop import PolicyGradientLoop

STEPS = 41
COUNT = "FLOWALIGN_BENCH_COUNT"
"""Environment variable of processes that count network calls."""
PLAIN: dict[str, Any] = {
    "wait_to_gather": lambda *_: None,
    "wait_for_all": lambda *_: None,
    "before_backward": lambda _, loss: loss,
}
"""Methods that make no announcement."""
ANNOUNCED = {name: getattr(CollectiveScheduler, name) for name in PLAIN}
RUN = PolicyGradientLoop.run


def time_steps(self: PolicyGradientLoop, steps: Any) -> Iterator[dict[str, float]]:
    """Run the steps; print the ratios after the last one. The first step, with checks, is left."""
    seconds: list[tuple[float, float]] = []
    made: list[int] = []
    calls = Counter[int]()
    self.learner.policy.denoiser.register_forward_pre_hook(lambda *_: calls.update([0]))
    running = RUN(self, steps)
    for step in steps:
        set_methods(PLAIN if step % 2 and COUNT not in os.environ else ANNOUNCED)
        dist.barrier()
        cpu, wall = time.process_time(), time.perf_counter()
        metrics = next(running)
        cpu = time.process_time() - cpu
        dist.barrier()
        seconds.append((cpu, time.perf_counter() - wall))
        set_methods(ANNOUNCED)
        made.append(calls.pop(0))
        if step == STEPS - 1:
            show_calls(made) if COUNT in os.environ else show(seconds)
            show_announcement()
        yield metrics


def set_methods(methods: dict[str, Any]) -> None:
    """Replace methods of the scheduler."""
    for name, method in methods.items():
        setattr(CollectiveScheduler, name, method)


def show(seconds: list[tuple[float, float]]) -> None:
    """Print the mean and the standard error of the relative costs of announcements."""
    pairs = list(zip(seconds[1::2], seconds[2::2], strict=True))
    for i, name in enumerate(("CPU", "wall")):
        costs = [100 * (announced[i] / plain[i] - 1) for plain, announced in pairs]
        error = statistics.stdev(costs) / sqrt(len(costs))
        rank = os.environ["RANK"]
        print(f"process {rank}, {name} time: {statistics.mean(costs):+.1f} +- {error:.1f} %")  # noqa: T201


def show_announcement() -> None:
    """Print the CPU time of one announcement."""
    begin = time.process_time()
    for _ in range(1000):
        _reduce_min(dist.group.WORLD, 0)
    print(f"one announcement: {1e3 * (time.process_time() - begin):.0f} microseconds")  # noqa: T201


def show_calls(made: list[int]) -> None:
    """Print how often both processes call the network equally often, from the second step on."""
    ranks: list[Any] = [None, None]
    dist.all_gather_object(ranks, made[1:])
    pairs = list(zip(*ranks, strict=True))
    if dist.get_rank() == 0:
        equal = sum(a == b for a, b in pairs)
        more = sum(map(max, pairs)) / sum(map(sum, pairs)) * 2 - 1
        print(f"equal network calls in {equal} of {len(pairs)} steps")  # noqa: T201
        print(f"the process with more calls makes {100 * more:.1f} % more than the mean")  # noqa: T201


if __name__ == "__main__":
    if "RANK" in os.environ:
        PolicyGradientLoop.run = time_steps
        runpy.run_module("flowalign", run_name="__main__")
    words = ["train", "configs/shapes.yaml", "--threads", "1"]
    words += ["--num_steps", str(STEPS), "--evaluation", "null", "--checkpoints.verify", "never"]
    words += ["--recipe.prompts_per_step", "4", "--recipe.sampling.samples_per_prompt", "8"]
    if sys.argv[1:2] == ["--count"]:
        os.environ[COUNT] = "1"
        words += ["--recipe.micro_batch", "8", *sys.argv[2:]]
    else:
        words += ["--sharding.weights", "blocks"]
    with tempfile.TemporaryDirectory() as folder:
        words += ["--output_dir", f"{folder}/run"]
        sys.exit(run_together(Launch(2), [sys.executable, __file__, *words]))
