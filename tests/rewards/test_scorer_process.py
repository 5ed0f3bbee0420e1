"""A reward in a separate process equals the reward, restarts or fails by name, and always ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from flowalign.rewards.checked import CheckedReward, RewardGone
from flowalign.rewards.config import build_reward_models
from flowalign.rewards.protocol import output_from_json, output_to_json
from flowalign.rewards.scorer import TOKEN
from flowalign.types import MediaBatch, RewardOutput
from flowalign.utils.errors import ConfigError
from reward_models.wrappers.out_of_process import ScorerProcess
from tests.fixtures.scorers import PLACES, Mortal, Places, batch_of, mortal_entry
from tests.fixtures.zygote import python


@pytest.fixture(autouse=True)
def quick_start(monkeypatch):
    """Let scorers start without importing everything again."""
    monkeypatch.setattr(sys, "executable", python())


def mortal(folder: Path, *dies_at: int, **settings) -> ScorerProcess:
    folder.mkdir(exist_ok=True)
    settings = {"dims": ["level"], "device": "cpu", "timeout": 30.0} | settings
    return ScorerProcess(mortal_entry(folder, *dies_at), **settings)


def calls(folder: Path) -> list[list[int]]:
    """Process and size of each call."""
    files = sorted(folder.iterdir(), key=lambda path: int(path.name))
    return [[int(word) for word in file.read_text().split()] for file in files]


def test_a_run_file_says_what_runs_where_and_the_class_is_checked_here():
    entry = {
        "class_path": "reward_models.ScorerProcess",
        "init_args": {"reward": PLACES, "device": "cuda:3"},
    }
    (model,), text = build_reward_models({"rewards": [entry]}, "x.yaml")
    assert (model.spec.name, model.spec.dims, model.spec.maps) == ("places", ("bright",), True)
    assert "tests.fixtures.scorers.Places" in text
    wrong = entry["init_args"] | {"reward": PLACES | {"init_args": {"secnds": 1}}}
    with pytest.raises(ConfigError, match="secnds"):
        build_reward_models({"rewards": [entry | {"init_args": wrong}]}, "x.yaml")


def test_a_class_of_another_environment_declares_its_dimensions():
    elsewhere = {"class_path": "not_here.Model"}
    model = ScorerProcess(elsewhere, dims=["taste", "sharpness"])
    assert (model.spec.name, model.spec.dims) == ("Model", ("taste", "sharpness"))
    with pytest.raises(ConfigError, match="not_here"):
        ScorerProcess(elsewhere)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"python": "/no/such/python"}, "/no/such/python"),
        ({"device": "gpu"}, "'gpu'; it must be cpu, cuda:N or null"),
        ({"reward": {"path": "x"}}, "must have class_path"),
        ({"reward": PLACES | {"where": 1}}, "may have init_args"),
    ],
)
def test_what_cannot_be_started_is_refused_before_anything_starts(settings, message):
    with pytest.raises(ValueError, match=message):
        ScorerProcess(**{"reward": PLACES, "dims": ["bright"]} | settings)


def test_maps_travel_as_they_are_and_failed_samples_have_none():
    model, batch = Places(), batch_of()
    batch.media[1] = 0.0
    sent = model.score(batch)
    got = output_from_json(output_to_json(sent), model.spec, 3)
    assert_close(got.maps["places"], sent.maps["places"], rtol=0, atol=0, equal_nan=True)
    assert got.maps["places"][1].isnan().all()
    assert got.reasons == {1: "it is black"}
    content = output_to_json(sent)
    content["maps"]["shape"] = [3, 8, 6]
    with pytest.raises(ValueError, match="maps of shape"):
        output_from_json(content, model.spec, 3)


def test_a_reward_that_is_gone_ends_runs_that_drop_failures_too():
    class Gone(Places):
        def score(self, batch: MediaBatch) -> RewardOutput:
            if len(batch) < 3:
                raise RewardGone("the process died")
            return super().score(batch)

    checked = CheckedReward(Gone(), "drop_sample")
    assert checked.score(batch_of()).valid.all()
    with pytest.raises(RewardGone):
        checked.score(batch_of(2))


@pytest.mark.slow
def test_a_reward_in_its_own_process_gives_the_same_bits():
    model, batch = ScorerProcess(PLACES, device="cpu"), batch_of()
    batch.media[1] = 0.0
    here = CheckedReward(Places()).score(batch)
    there = CheckedReward(model).score(batch)
    for name in ("values", "valid"):
        assert torch.equal(getattr(here, name).nan_to_num(-1), getattr(there, name).nan_to_num(-1))
    assert_close(here.maps["places"], there.maps["places"], rtol=0, atol=0, equal_nan=True)
    assert here.reasons == there.reasons
    assert Places().spec.fingerprint() in model.spec.version
    none = CheckedReward(model).score(MediaBatch(batch.media[1:2], ["a"]))
    assert not none.valid.any()
    scorer = model._scorer
    assert scorer is not None
    assert TOKEN not in os.environ
    command = Path(f"/proc/{scorer.child.process.pid}/cmdline").read_text()
    assert scorer.token not in command
    del model, scorer


@pytest.mark.slow
def test_a_scorer_that_dies_is_started_again_and_gets_the_batch_again(tmp_path):
    folder, batch = tmp_path / "calls", batch_of(5)
    model = mortal(folder, 1)
    assert model.score(batch_of()).valid.all()
    again = model.score(batch)
    assert model.spec.needs == ("prompt",)
    assert torch.equal(again.values, Mortal(str(folder), [9]).score(batch).values)
    (first, _), (died, size), (second, again_size), *_ = calls(folder)
    assert first == died != second
    assert size == again_size == 5
    assert model.restarts == 2


@pytest.mark.slow
def test_a_scorer_that_always_dies_ends_the_run_by_name(tmp_path):
    folder = tmp_path / "calls"
    model = mortal(folder, -1, restarts=1)
    with pytest.raises(RewardGone, match=r"reward 'mortal' died: it ended by SIGKILL"):
        CheckedReward(model, "drop_sample").score(batch_of())
    assert len(calls(folder)) == 2


@pytest.mark.slow
def test_a_scorer_that_cannot_start_says_why():
    missing = ScorerProcess({"class_path": "not_here.Model"}, dims=["taste"], device="cpu")
    with pytest.raises(ValueError, match="of Model cannot be used: it ended with code 2") as e:
        missing.load()
    assert "not_here" in str(e.value)
    other = ScorerProcess(PLACES, dims=["taste"], device="cpu")
    with pytest.raises(ValueError, match="the scorer of Places gives bright, not taste"):
        other.load()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_scorer_ends_with_the_process_that_started_it(tmp_path, number):
    code = (
        "import time; from pathlib import Path\n"
        "from tests.rewards.test_scorer_process import mortal\n"
        f"model = mortal(Path({str(tmp_path / 'calls')!r}), 9); model.load()\n"
        "print(model._scorer.child.process.pid, flush=True); time.sleep(600)"
    )
    trainer = subprocess.Popen([python(), "-c", code], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout
    scorer = int(trainer.stdout.readline())
    assert _lives(scorer)
    trainer.send_signal(number)
    trainer.wait(60)
    until = time.monotonic() + 20
    while _lives(scorer) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _lives(scorer)


def _lives(pid: int) -> bool:
    """Return whether a process runs; a zombie, which nobody has waited for, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
