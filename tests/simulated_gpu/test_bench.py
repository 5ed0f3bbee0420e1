"""`make bench-gpu` and tests of `tests/gpu` are rehearsed on the simulated GPU."""

import math

import pytest

from assets.bench import gpu_sizes
from tests.fixtures.simulated_bench import rehearse, run_tests
from tests.fixtures.simulated_gpu import on_simulated_gpu

pytestmark = pytest.mark.slow
PARTS = "ratio", "ratio_fp16", "planned", "curve"


def test_parts_of_the_benchmark_run_on_a_gpu(tmp_path):
    gpu_sizes.build_networks(gpu_sizes.SMALL, tmp_path)
    found, _ = on_simulated_gpu(rehearse, tmp_path, *PARTS)
    for figures in (one for part in found.values() for one in part.values()):
        assert "failed" not in figures
        assert all(math.isfinite(value) for value in figures.values())
    drifts = [*found["ratio"].values(), *found["ratio_fp16"].values()]
    assert len(drifts) == 4  # two precisions, two micro-batches
    assert all(one["largest_drift"] <= one["allowed"] for one in drifts)
    assert found["planned"]["a step"]["gib"] > 0
    assert found["planned"]["operations"]["tflop/with_backward"] > 0
    assert len(found["curve"]) == gpu_sizes.SMALL.curve


def test_gpu_tests_of_reward_models_pass(tmp_path):
    found, _ = on_simulated_gpu(run_tests, tmp_path, "tests/gpu/test_rewards_gpu.py")
    assert found == {"tests": {"passed": 4.0}}
