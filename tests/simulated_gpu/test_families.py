"""Every family samples, decodes, updates and saves on the simulated GPU, in half precision."""

import pytest
import torch

from tests.fixtures.simulated_families import (
    cast_once,
    decode_peaks,
    modules_from_main_memory,
    offload,
    use,
    use_kernel,
)
from tests.fixtures.simulated_gpu import on_simulated_gpu
from tests.fixtures.tiny_families import TINY

pytestmark = pytest.mark.slow
NAMES = {"bf16": "bfloat16", "fp16": "float16"}
DISPATCHING = ("flux1", "flux2", "qwen_image", "krea2", "z_image", "wan", "wan22_5b", "ltx")
DISPATCHING += ("ltx2", "hunyuan", "hunyuan15")
"""Families whose layers take an attention backend."""
NORMS_IN_FLOAT32 = ("sd", "flux", "qwen", "hunyuan", "cogvideox")
"""Beginnings of the names of families with norms that autocast computes in float32. The norms of
other families cast their results."""
READS = {"wan22": 1}
"""Reads of the host in each evaluation: of Wan 2.2 the timestep chooses the network."""


@pytest.mark.parametrize("name", TINY)
def test_a_family_runs_on_a_gpu_with_one_dtype_in_attention(name, tmp_path):
    """The device raises for two devices, and for mixed dtypes in attention."""
    for settings, seen in on_simulated_gpu(use, name, tmp_path)[0].items():
        assert seen.attention["/".join([NAMES[settings.split()[0]]] * 3)]
        reads = sum(seen.reads.values())  # of two steps
        assert reads == 2 * READS.get(name, 0), f"the host waits in evaluations: {seen.reads}"
        assert not seen.float64


@pytest.mark.parametrize("name", ["sd3", "wan22"])
def test_weights_are_read_to_the_gpu_tensor_by_tensor(name, tmp_path):
    """Otherwise each process of a machine would hold a whole pipeline in main memory."""
    assert on_simulated_gpu(modules_from_main_memory, name, tmp_path)[0] == []


@pytest.mark.parametrize("name", TINY)
def test_attention_casts_its_inputs_once_with_the_same_bits(name, tmp_path):
    (same, once, before), _ = on_simulated_gpu(cast_once, name, tmp_path)
    assert same
    assert (once < before) == name.startswith(NORMS_IN_FLOAT32)
    assert once <= before


def test_offloaded_weights_give_the_same_gradient_and_stay_in_main_memory():
    """Weights that the backward pass needs, such as those of norms, are still on the device."""
    found = {place: on_simulated_gpu(offload, place)[0] for place in ("none", "layers")}
    (on_device, larger, expected), (in_memory, smaller, gradient) = found.values()
    assert (on_device, in_memory) == ({"cuda"}, {"cpu"})
    assert smaller < 0.8 * larger
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("name", DISPATCHING)
def test_kernels_of_one_dtype_and_a_backward_pass_outside_of_autocast_work(name, tmp_path):
    """`speed.attention: flash`, and how diffusers computes gradients with a context degree."""
    on_simulated_gpu(use_kernel, name, tmp_path)


@pytest.mark.parametrize("name", ["sd3", "flux1", "qwen_image", "flux2", "wan"])
def test_decoding_takes_what_check_expects_and_less_in_chunks_and_tiles(name, tmp_path):
    peaks, _ = on_simulated_gpu(decode_peaks, name, tmp_path)
    assert peaks["one"] == pytest.approx(peaks["expected"], rel=0.15)
    assert peaks["four"] > 3 * peaks["one"]
    assert peaks["chunks"] < 2 * peaks["one"]
    if name != "wan":
        assert peaks["tile"] == pytest.approx(peaks["expected tile"], rel=0.15)
        assert peaks["tile"] < 0.6 * peaks["one"]
