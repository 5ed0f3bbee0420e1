"""Every family samples, decodes, updates and saves on the simulated GPU, in half precision."""

import pytest
import torch

from tests.fixtures.simulated_families import examine, modules_from_main_memory, offload
from tests.fixtures.simulated_gpu import on_simulated_gpu
from tests.fixtures.tiny_families import TINY

pytestmark = pytest.mark.slow
NAMES = {"bf16": "bfloat16", "fp16": "float16"}
DISPATCHING = ("flux1", "flux2", "qwen_image", "krea2", "z_image", "wan", "wan22_5b", "ltx")
DISPATCHING += ("ltx2", "hunyuan", "hunyuan15")
"""Families whose layers take an attention backend."""
DECODING = ("sd3", "flux1", "qwen_image", "flux2", "wan")
"""One family of each autoencoder, with the memory that decoding takes."""
NORMS_IN_FLOAT32 = ("sd", "flux", "qwen", "hunyuan", "cogvideox")
"""Beginnings of the names of families with norms that autocast computes in float32. The norms of
other families cast their results."""
READS = {"wan22": 1}
"""Reads of the host in each evaluation: of Wan 2.2 the timestep chooses the network."""


@pytest.mark.parametrize("name", TINY)
def test_a_family_samples_decodes_updates_and_saves_on_a_gpu(name, tmp_path):
    """The device raises for two devices, and for mixed dtypes in attention.

    Layers that dispatch attention also work with `speed.attention: flash`, whose gradient is
    computed outside of autocast, as diffusers does with a context degree.
    """
    report, _ = on_simulated_gpu(examine, name, tmp_path, name in DISPATCHING, name in DECODING)
    for settings, seen in report.seen.items():
        assert seen.attention["/".join([NAMES[settings.split()[0]]] * 3)]
        reads = sum(seen.reads.values())  # of two steps
        assert reads == 2 * READS.get(name, 0), f"the host waits in evaluations: {seen.reads}"
        assert not seen.float64
    same, once, before = report.cast
    assert same, "attention that casts its inputs once computes other bits"
    assert (once < before) == name.startswith(NORMS_IN_FLOAT32)
    assert once <= before
    if name in DECODING:
        assert_peaks(report.peaks, tiles=name != "wan")


def assert_peaks(peaks: dict[str, int], tiles: bool) -> None:
    """Decoding takes the memory that `check` expects, and less in chunks and tiles."""
    assert peaks["one"] == pytest.approx(peaks["expected"], rel=0.15)
    assert peaks["four"] > 3 * peaks["one"]
    assert peaks["chunks"] < 2 * peaks["one"]
    if tiles:
        assert peaks["tile"] == pytest.approx(peaks["expected tile"], rel=0.15)
        assert peaks["tile"] < 0.6 * peaks["one"]


@pytest.mark.parametrize("name", ["sd3", "wan22"])
def test_weights_are_read_to_the_gpu_tensor_by_tensor(name, tmp_path):
    """Otherwise each process of a machine would hold a whole pipeline in main memory."""
    assert on_simulated_gpu(modules_from_main_memory, name, tmp_path)[0] == []


def test_offloaded_weights_give_the_same_gradient_and_stay_in_main_memory():
    """Weights that the backward pass needs, such as those of norms, are still on the device."""
    found = {place: on_simulated_gpu(offload, place)[0] for place in ("none", "layers")}
    (on_device, larger, expected), (in_memory, smaller, gradient) = found.values()
    assert (on_device, in_memory) == ({"cuda"}, {"cpu"})
    assert smaller < 0.8 * larger
    assert torch.equal(gradient, expected)
