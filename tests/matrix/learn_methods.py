"""Forty toy steps of every method of `configs/methods` do not lower the reward: `make test-long`.

One step cannot show a method that destroys the policy. The file of the pair is used if there is one
in `configs/credit/toy_shapes`, as its values are tuned. It takes an hour or more on two cores, so
no other target collects this file.
"""

import json
from pathlib import Path
from statistics import fmean

import pytest

from flowalign.runs.combinations import combination
from flowalign.runs.run_files import recipes
from flowalign.utils.tracking import read_metrics
from tests.fixtures.commands import exit_code

STEPS, ENDS = 40, 8
FOUND = Path("build/learn_methods.jsonl")
FALL = 0.05
"""Fall of the mean reward that noise explains: each end is the mean of 384 samples."""
KNOWN = {one.name: one for one in recipes()}
METHODS = sorted(name.partition("/")[2] for name in KNOWN if name.startswith("methods/"))
WITHOUT_REWARDS = ("diffusion_dpo", "flow_dpo", "ipo", "focus_dpo", "soar", "cpo", "cpo_expert")
"""Methods that train on stored data, which are not scored during training."""


@pytest.mark.parametrize("method", METHODS)
def test_forty_toy_steps_do_not_lower_the_reward(method, tmp_path):
    if method in WITHOUT_REWARDS:
        pytest.skip("it trains on stored data")
    found = combination(KNOWN["models/toy_shapes"], method, KNOWN)
    if found is None:
        pytest.skip("it is no run on Shapes: it needs videos, sources, other data or networks")
    files = [str(part.file) for part in found.parts]
    settings = ["--evaluation=null", f"--num_steps={STEPS}", f"--output_dir={tmp_path / 'run'}"]
    assert exit_code("train", *files, *settings) == 0
    rows = [row for row in read_metrics(tmp_path / "run") if "reward_mean" in row]
    rewards = [row["reward_mean"] for row in rows]
    assert len(rewards) == STEPS
    start, end = fmean(rewards[:ENDS]), fmean(rewards[-ENDS:])
    told = {"method": method, "start": round(start, 3), "end": round(end, 3)}
    FOUND.parent.mkdir(exist_ok=True)
    with FOUND.open("a") as file:
        file.write(json.dumps(told) + "\n")
    assert end > start - FALL, told
