"""What only a GPU can show. `pytest -m gpu tests/gpu`."""

from dataclasses import replace

import pytest
import torch

from assets.bench import gpu_parts, gpu_sizes
from flowalign import runs
from flowalign.cli.main import main
from flowalign.runs.config import load
from flowalign.training.reference import EMA, AdapterOff
from pipelines.network.cuda_graphs import GraphedForward
from tests.fixtures.device_runs import CREDIT_METHODS, method, shared, two_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TINY = replace(gpu_sizes.SMALL, device="cuda")
"""The networks of the tests on the CPU."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    gpu_sizes.build_networks(TINY, folder)
    return folder


def finished(run, text):
    return runs.train(runs.start(run, text, lambda _: None))["status"] == "finished"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_loop_trains_in_every_precision(tmp_path, precision):
    assert finished(*two_steps("configs/shapes.yaml", "cuda", precision, tmp_path))


def test_initial_noise_is_the_same_on_every_device():
    run, _ = load("configs/shapes.yaml", ["device=cuda"])
    run.policy.load(torch.device("cuda"))
    noise = run.policy.noise(2, torch.Generator().manual_seed(0))
    expected = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(noise.cpu(), expected)


def test_two_updates_are_those_of_the_cpu(tmp_path):
    ((_, found),) = gpu_parts.parity(TINY, tmp_path)
    assert found["largest_difference"] < 0.02 * found["largest_change"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_ratios_are_within_a_quarter_of_the_clip_in_half_precision(tiny, precision):
    for name, found in gpu_parts.ratio(TINY, tiny, precision):
        assert found["largest_drift"] <= found["allowed"], name


def test_every_attention_backend_that_is_there_agrees_with_plain_arithmetic(tiny):
    (_, auto), *others = gpu_parts.attention(TINY, tiny)
    assert auto["chosen"] in dict(others)
    for name, found in others:
        if not name.endswith("_hub"):  # these need a download
            assert "failed" not in found, (name, found)
            assert found["largest_difference"] < 0.03, name


def test_compiled_blocks_compute_what_they_computed(tiny):
    found = dict(gpu_parts.compiling(TINY, tiny))["compiled"]
    assert "failed" not in found, found
    assert found["largest_difference"] < 0.03


def test_graphs_have_the_bits_of_evaluations(tiny):
    """After three updates, with an average, and with the adapter off."""
    policy, given = gpu_sizes.network(gpu_sizes.pictures(TINY, tiny, [], None, []), TINY)
    replayed, plain = GraphedForward(policy.denoiser), policy.denoiser.forward
    named = [p for p in policy.denoiser.parameters() if p.requires_grad]
    optimizer, average = torch.optim.AdamW(named, lr=0.01), EMA(named, 0.5)

    @torch.no_grad()
    def check(field):
        found = []
        for forward in (replayed, plain):
            policy.denoiser.forward = forward
            found.append(field.velocity(*given))
        assert torch.equal(*found)

    check(policy)
    for _ in range(3):
        policy.velocity(*given).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update(1)
        check(policy)
    with average.applied():
        check(policy)
    check(AdapterOff(policy))
    check(policy)
    assert len(replayed.recordings) == 2


def test_a_step_with_kept_graphs_is_measured(tiny):
    for name, found in gpu_parts.retain(TINY, tiny):
        assert "failed" not in found, (name, found)


@pytest.mark.parametrize("part", ["flow_grpo", "nft", "nft_compiled", "wan", "tempflow_grpo"])
def test_stages_and_their_memory_are_measured(tiny, part):
    found = dict(gpu_parts.PARTS[part](TINY, tiny))["a step"]
    assert "failed" not in found, found
    for name in ("sample", "decode", "update", "floor"):
        assert found[f"gib/{name}"] > 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("changes", [[], ["--policy.lora", "null"]], ids=["adapter", "all"])
def test_two_gpus_share_weights(tmp_path, changes):
    with pytest.raises(SystemExit) as ended:
        main([*shared("cuda", tmp_path), *changes])
    assert ended.value.code == 0


@pytest.mark.parametrize("name", CREDIT_METHODS)
def test_every_credit_method_trains_on_a_gpu(tmp_path, name):
    assert finished(*method(name, "cuda", tmp_path))
