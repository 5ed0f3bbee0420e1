"""The minimal example is the policy-gradient loop, unrolled."""

import json
import re
import subprocess

import pytest

from flowalign.cli.main import main
from tests.fixtures.doc_pages import DOCS
from tests.fixtures.zygote import python

EXAMPLE = DOCS / "examples" / "minimal_grpo.py"
_STEP = re.compile(r"step +\d+ +reward ([\d.]+) +ratio ([\d.]+) +gradient norm ([\d.]+)")


def test_the_example_can_be_read_in_one_go():
    assert len(EXAMPLE.read_text().splitlines()) <= 126


@pytest.mark.slow
def test_the_example_takes_the_same_steps_as_the_full_loop(tmp_path):
    small = ["--steps", "2", "--held_out", "4"]
    done = subprocess.run([python(), EXAMPLE, *small], capture_output=True, text=True, check=True)
    example = [[float(number) for number in step] for step in _STEP.findall(done.stdout)]
    assert "held-out exact_match" in done.stdout
    same = ["num_steps=2", "optimizer.decay=linear", "evaluation=null", "ema=null"]
    with pytest.raises(SystemExit):
        main(["train", "configs/models/toy_shapes.yaml", *same, f"output_dir={tmp_path}/run"])
    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    full = [[row["reward_mean"], row["ratio_mean"], row["optim/grad_norm"]] for row in rows]
    for ours, theirs in zip(example, full, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)
