"""The table of models that a machine can train: its verdicts, and the plans behind it."""

import json
import time

import pytest

from flowalign.cli import doctor
from flowalign.cli.main import parse
from flowalign.runs import run_files
from flowalign.runs.config import load
from flowalign.runs.planning import memory_parts
from flowalign.runs.run_files import describe_models
from flowalign.runs.run_memory import peak

TABLE = json.loads(run_files._TABLE.read_text())


def test_the_largest_micro_batch_that_fits_is_named():
    plan = TABLE["sd35_medium"]["fp16"]
    assert list(plan) == ["1", "2", "4", "8"]
    fitting, others = describe_models(plan["4"])
    assert fitting["sd35_medium"].startswith("fp16: micro-batch 4 (")
    assert "nf4 weights: micro-batch" in fitting["sd35_medium"]
    assert fitting.keys() | others.keys() == TABLE.keys()
    assert "sd35_medium" not in others
    least = min(min(sizes.values()) for sizes in TABLE["sd35_medium"].values())
    row = describe_models(least - 1)[1]["sd35_medium"]
    assert row.startswith(f"fp16: {plan['1'] / 1e9:.0f} GB")
    start = time.process_time()
    assert not describe_models(0)[0]
    assert time.process_time() - start < 1
    assert len(TABLE) >= 25


@pytest.mark.slow
def test_the_table_equals_a_plan():
    run, _ = load(["configs/models/sd35_medium.yaml"], [])
    planned = TABLE["sd35_medium"]["fp16"][str(run.recipe.micro_batch)]
    assert planned == pytest.approx(peak(memory_parts(run)), rel=0.01)


def test_the_doctor_prints_it(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "versions", lambda: {"python": "3"})
    monkeypatch.setattr(doctor, "gpu_bytes", lambda: 24 * 10**9)
    assert doctor.run(parse(["doctor"])) == 0
    told = capsys.readouterr().out
    first, second = told.split("memory of a GPU that other models need")
    assert "models that this machine can train" in first
    assert "sd35_medium" in first
    assert "flux1_dev" in second
