"""The GPU measurements run on the CPU at toy scale, so that they keep working."""

import json
import math
import sys
from functools import partialmethod

import pytest
import torch

from assets.bench import gpu, gpu_parts, gpu_sizes, gpu_stages
from tests.fixtures.zygote import python

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("networks")
    gpu_sizes.build_networks(gpu_sizes.SMALL, made)
    return made


@pytest.mark.parametrize("part", sorted(gpu_parts.PARTS.keys() - {"tests", "ratio_fp16"}))
def test_every_part_gives_figures_on_tiny_networks(part, folder, monkeypatch):
    """Blocks are traced as on a GPU, but no C++ is compiled, which takes most of a minute."""
    traced = partialmethod(torch.nn.Module.compile, backend="eager")
    monkeypatch.setattr(torch.nn.Module, "compile", traced)
    found = dict(gpu_parts.PARTS[part](gpu_sizes.SMALL, folder))
    assert found
    for figures in found.values():
        assert "failed" not in figures, figures
        numbers = [value for value in figures.values() if not isinstance(value, str)]
        assert all(math.isfinite(value) for value in numbers)
    if part == "attention":
        assert {"native", "_native_math"} <= found.keys()
        assert found["_native_math"]["largest_difference"] == 0
        assert 0 < found["native"]["largest_difference"] < 0.03, "the backend makes no difference"
    if (method := part.removesuffix("_compiled").removesuffix("_before")) in EVALUATIONS:
        step = found["a step"]
        stages = [step[f"seconds/{name}"] for name in ("sample", "decode", "reward", "update")]
        assert min(stages) > 0
        assert step["seconds/step"] == pytest.approx(sum(stages))
        assert step["network_evaluations"] == EVALUATIONS[method]
        assert method != "flow_grpo" or step["check/ratio_drift_0"] < 1e-5


def test_a_precision_that_needs_a_gpu_is_said_in_its_part(folder):
    found = dict(gpu_parts.PARTS["ratio_fp16"](gpu_sizes.SMALL, folder))
    assert len(found) == 2
    assert all("fp16 needs a GPU" in str(figures["failed"]) for figures in found.values())


def test_tests_that_fail_on_a_gpu_are_named_with_their_message(tmp_path):
    report = tmp_path / "tests.xml"
    cases = '<testcase name="good"/><testcase name="absent"><skipped message="no GPU"/></testcase>'
    cases += '<testcase name="bad"><failure message="two devices">...</failure></testcase>'
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    found = dict(gpu_stages.outcomes(report))
    assert found["bad"] == {"failed": "two devices"}
    assert found["tests"] == {"passed": 1.0, "skipped": 1.0, "failure": 1.0}


SIZE = gpu_sizes.SMALL
LAST = SIZE.num_steps - 1
SEEDS, CHILDREN = SIZE.comb
TAILS = SEEDS * CHILDREN * sum(LAST - k for k in range(LAST))
EVALUATIONS = {
    # rollout, and at each step but the last one with and one without gradient, of the reference
    "flow_grpo": SIZE.group * (SIZE.num_steps + 2 * LAST),
    # spines to the last branching, their children's ways to the end, and both at each branching
    "tempflow_grpo": SEEDS * LAST + TAILS + 2 * SEEDS * LAST,
    # a multistep sampler, then policy, old policy and reference at each noise level
    "nft": SIZE.group * (SIZE.num_steps + 3 * LAST),
    "wan": SIZE.clips * (SIZE.num_steps + 2 * LAST),
}


def test_a_part_that_fails_or_takes_too_long_is_named_and_loses_nothing(tmp_path, monkeypatch):
    late = gpu.run_part("parity", "small", str(tmp_path), 1.0)
    assert late["state"] == "stopped after 1 seconds"
    (tmp_path / "attention.jsonl").write_text('["native", {"seconds": 1.5}]\n')
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", python())
        failed = gpu.run_part("attention", "small", str(tmp_path / "absent"), 300.0)
    assert failed["state"].startswith("failed (1): FileNotFoundError")
    kept = gpu.run_part("attention", "small", str(tmp_path), 1.0)
    assert kept["figures"] == {"native": {"seconds": 1.5}}
    assert gpu.run_part("wan", "small", str(tmp_path), 0.0)["state"].startswith("not started")


def test_machine_versions_commit_and_settings_are_written_with_the_parts(tmp_path, monkeypatch):
    made = {"state": "done", "seconds": 2.0, "figures": {"eager": {"seconds/forward": 0.25}}}
    monkeypatch.setattr(gpu, "run_part", lambda *_: made)
    out = tmp_path / "new/out.json"
    gpu.main(["--parts", "compile", "--limit", "7", "--out", str(out)])
    found = json.loads(out.read_text())
    assert found["parts"] == {"compile": made}
    assert found["settings"]["limit"] == "7.0"
    assert found["size"]["group"] == gpu_sizes.SMALL.group
    assert {"torch", "diffusers"} <= found["libraries"].keys()
    assert len(found["commit"].split()[0]) == 40
    assert [path.name for path in out.parent.iterdir()] == ["out.json"]
    with pytest.raises(SystemExit):
        gpu.main(["--parts", "compiled"])


def test_a_part_that_is_done_is_not_run_again(tmp_path, monkeypatch, capsys):
    ran = []

    def run_part(part, *_):
        ran.append(part)
        state = "done" if len(ran) != 2 else "stopped after 60 seconds"
        return {"state": state, "seconds": 1.0, "figures": {"a step": {"seconds/step": 2.0}}}

    monkeypatch.setattr(gpu, "run_part", run_part)
    words = ["--parts", "flow_grpo,nft", "--out", str(tmp_path / "out.json")]
    gpu.main(words)
    gpu.main([*words, "--resume"])
    assert ran == ["flow_grpo", "nft", "nft"]
    found = json.loads((tmp_path / "out.json").read_text())["parts"]
    assert {one["state"] for one in found.values()} == {"done"}
    assert "of the recorded" not in capsys.readouterr().out, "sizes differ"


def test_one_failure_within_a_part_is_its_message():
    def fails():
        raise RuntimeError("no kernel for this device")

    assert gpu_parts.attempt(fails) == {"failed": "RuntimeError: no kernel for this device"}
