"""The table of models that a machine can train: its verdicts, and the plans behind it."""

import json
import time

import pytest

from flowalign.cli.commands import doctor
from flowalign.cli.main import parse
from flowalign.runs.config import load
from flowalign.runs.library import trainable
from flowalign.runs.library.trainable import describe_models
from flowalign.runs.planning.memory import peak
from flowalign.runs.planning.plan import memory_parts

TABLE = json.loads(trainable._TABLE.read_text())


def test_a_model_fits_up_to_its_planned_bytes():
    plan = TABLE["sd35_medium"]
    assert describe_models(plan["bytes"])["sd35_medium"].startswith("fp16, micro-batch 8: fits")
    assert "needs" in describe_models(plan["bytes"] - 1)["sd35_medium"]
    start = time.process_time()
    assert all("needs" in row for row in describe_models(0).values())
    assert time.process_time() - start < 1
    assert len(TABLE) >= 10


@pytest.mark.slow
def test_the_table_equals_a_plan():
    run, _ = load(["configs/models/sd35_medium.yaml"], [])
    plan = TABLE["sd35_medium"]
    assert (plan["precision"], plan["micro_batch"]) == ("fp16", run.recipe.micro_batch)
    assert plan["bytes"] == pytest.approx(peak(memory_parts(run)), rel=0.01)


def test_the_doctor_prints_it(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "versions", lambda: {"python": "3"})
    monkeypatch.setattr(doctor, "gpu_bytes", lambda: 24 * 10**9)
    assert doctor.run(parse(["doctor"])) == 0
    told = capsys.readouterr().out
    assert "models that this machine can train" in told
    assert "flux1_dev" in told
