"""The runs of the tests on a GPU are valid, and their common code runs on the CPU."""

import subprocess

import pytest
import torch

from flowalign import runs
from flowalign.cli.main import build_parser
from flowalign.runs import plan
from tests.fixtures.device_runs import CREDIT_METHODS, method, shared, two_steps
from tests.fixtures.zygote import python

slow = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize("name", CREDIT_METHODS)
def test_every_credit_method_has_a_valid_run(name, tmp_path):
    run, _ = method(name, "cpu", tmp_path)
    assert run.num_steps == 2
    assert run.recipe.examples_per_step > 2


@slow
@pytest.mark.parametrize("file", ["configs/shapes.yaml", "configs/models/shapes_video.yaml"])
def test_two_steps_of_the_embedded_models_run_on_the_cpu_too(file, tmp_path):
    run, text = two_steps(file, "cpu", "bf16", tmp_path)
    small = runs.start(run, text, lambda _: None)
    assert runs.train(small)["status"] == "finished"


def test_two_processes_that_share_weights_are_asked_for_by_known_words(tmp_path):
    args, rest = build_parser().parse_known_args(shared("cpu", tmp_path))
    run, _ = runs.load(args.config, rest)
    assert (args.processes, run.sharding.weights, run.num_steps) == (2, "blocks", 2)
    assert plan(run, 2)


@slow
def test_the_tests_on_a_gpu_can_be_collected():
    code = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    words = ["-m", "gpu", "--collect-only", "-q", "--noconftest", "tests/gpu"]
    done = subprocess.run(
        [python(), "-c", code, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("::test_") > 40
    assert torch.cuda.is_available() or "error" not in done.stdout.lower()
