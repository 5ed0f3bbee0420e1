"""`make bench-gpu` is rehearsed on the simulated GPU."""

import math

import pytest

from assets.bench import gpu_sizes
from tests.fixtures.simulated_bench import rehearse, run_tests
from tests.fixtures.simulated_gpu import on_simulated_gpu

pytestmark = pytest.mark.slow
PARTS = "ratio", "planned", "curve", "scoring"


def test_parts_of_the_benchmark_run_on_a_gpu(tmp_path):
    gpu_sizes.build_networks(gpu_sizes.SMALL, tmp_path)
    found, _ = on_simulated_gpu(rehearse, tmp_path, *PARTS)
    for figures in (one for part in found.values() for one in part.values()):
        assert "failed" not in figures
        assert all(math.isfinite(value) for value in figures.values())
    drifts = found["ratio"]
    assert len(drifts) == 4  # two precisions, two micro-batches
    assert all(one["largest_drift"] <= one["allowed"] for one in drifts.values())
    assert found["planned"]["a step"]["gib"] > 0
    assert found["planned"]["operations"]["tflop/with_backward"] > 0
    assert len(found["curve"]) == gpu_sizes.SMALL.curve


GPU_TESTS = {
    "tests/gpu/test_rewards_gpu.py": "test",
    "tests/gpu/test_preference_gpu.py": "DPO or NFT or KTO",
    "tests/gpu/test_gpu.py": "noise or every_precision",
}
"""Tests on a GPU, and which of them run. The others measure what `test_parts_of_the_benchmark` and
`test_recipes.py` run, or need kernels, a full-size network or two devices in one process."""


@pytest.mark.parametrize("file", GPU_TESTS)
def test_tests_of_a_gpu_pass(file, tmp_path):
    found, _ = on_simulated_gpu(run_tests, tmp_path, file, "-k", GPU_TESTS[file])
    assert found.pop("tests").keys() == {"passed"}, found
    assert found == {}
