"""Further parts of `assets/bench/gpu.py`: tests, planned costs, a training curve, and scoring."""

import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from assets.bench.gpu_sizes import Size, network, pictures
from assets.bench.scoring import RandomClip
from flowalign.runs import load, run_memory
from flowalign.runs.bench import measure, start_temporarily
from flowalign.runs.planning import memory_parts
from flowalign.types import MediaBatch

Figures = dict[str, float | str]
ROOT = Path(__file__).parents[2]
MEASURED = "wan_2_1 or beat_finishing or parity or ratio or attention or compiled or stages"
"""Names of GPU tests that make the measurements of other parts."""


def gpu_tests(size: Size, folder: Path) -> Iterator[tuple[str, Figures]]:
    """Run the tests that need a GPU, except those of measurements; name each failure."""
    report = folder / "tests.xml"
    words = ["-m", "gpu", "-q", "-k", f"not ({MEASURED})", f"--junitxml={report}"]
    if size.device == "cpu":
        words.append("--collect-only")
    subprocess.run(
        [sys.executable, "-m", "pytest", *words, "tests/gpu"], cwd=ROOT, capture_output=True
    )
    yield from outcomes(report)


def outcomes(report: Path) -> Iterator[tuple[str, Figures]]:
    """Yield the tests of a JUnit report that did not pass, and the number of each outcome."""
    counts: Counter[str] = Counter()
    for case in ET.parse(report).iter("testcase"):
        state = next((child.tag for child in case if child.tag != "system-out"), "passed")
        counts[state] += 1
        if state in ("failure", "error"):
            message = next(child.get("message") or "" for child in case)
            yield str(case.get("name")), {"failed": message[:500]}
    yield "tests", {name: float(number) for name, number in counts.items()}


def planned(size: Size, folder: Path) -> Iterator[tuple[str, Figures]]:
    """Compare a step of Flow-GRPO at SD3.5-M's size with its planned memory and operations."""
    few = [f"recipe.sampling.samples_per_prompt={size.group}"]
    run = pictures(size, folder, [], None, few)
    expected = run_memory.peak(memory_parts(run)) / 2**30
    yield "plan", {"gib": expected}
    found = measure(run, 1)
    peak = max((v for name, v in found.items() if name.startswith("gib/")), default=0.0)
    seconds = {"seconds/step": found["seconds/step"], "overhead": found["overhead"]}
    yield "a step", {**seconds, "gib": peak, "share_of_plan": peak / expected}
    forward, both = operations(size, folder)
    trained = size.group * (size.num_steps - 1)
    step = (found["network_evaluations"] - trained) * forward + trained * both
    each = {"tflop/forward": forward / 1e12, "tflop/with_backward": both / 1e12}
    rate = step / 1e12 / found["seconds/step"]
    yield "operations", {**each, "tflop/step": step / 1e12, "tflop_per_second": rate}


def operations(size: Size, folder: Path) -> tuple[float, float]:
    """Return the floating-point operations of an evaluation of a sample, without and with backward.

    Matrix products and convolutions are counted, as twice the number of multiplications.
    """
    policy, given = network(pictures(size, folder, [], None, []), size, 1)
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        policy.velocity(*given)
    with FlopCounterMode(display=False) as both:
        policy.velocity(*given).square().mean().backward()
    return float(forward.get_total_flops()), float(both.get_total_flops())


def curve(size: Size, _: Path) -> Iterator[tuple[str, Figures]]:
    """Train Shapes, the bundled toy model, and report the mean reward of each step."""
    steps = size.curve
    few = ["evaluation=null", f"num_steps={steps}", f"device={size.device}"]
    run, _ = load("configs/shapes.yaml", few + ([] if steps > 2 else ["recipe.prompts_per_step=2"]))
    with start_temporarily(run) as session:
        begin = time.perf_counter()
        for step, metrics in enumerate(session.loop.run(range(steps))):
            seconds = time.perf_counter() - begin
            yield f"step {step}", {"reward_mean": metrics["reward_mean"], "seconds": seconds}
            begin = time.perf_counter()


def scoring(size: Size, _: Path) -> Iterator[tuple[str, Figures]]:
    """Time a CLIP with random weights on random images, by batch size."""
    model = RandomClip(size.clip, size.device)
    model.load()
    side = model.side[0] if isinstance(model.side, tuple) else model.side
    for rows in size.batches:
        media = torch.rand(rows, 1, 3, side, side)
        batch = MediaBatch(media, ["a red circle"] * rows)
        model.score(batch).values.tolist()
        begin = time.perf_counter()
        model.score(batch).values.tolist()
        yield f"batch of {rows}", {"images_per_second": rows / (time.perf_counter() - begin)}
