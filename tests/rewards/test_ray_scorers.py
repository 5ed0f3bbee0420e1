"""A pool of Ray actors gives the scores of the reward, to all processes, even if an actor dies."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from flowalign.rewards import scorer
from flowalign.rewards.checked import CheckedReward, RewardFailure, RewardGone
from flowalign.rewards.protocol import output_from_json, pack_batch
from flowalign.rewards.scorer import ScorerActor, ScorerPool
from flowalign.types import MAY_PASS
from flowalign.utils.errors import ConfigError
from reward_models.wrappers.out_of_process import RayScorers
from tests.fixtures.scorers import PLACES, Mortal, Places, batch_of, mortal_entry
from tests.fixtures.zygote import ROOT, python


def mortal(folder, *dies_at: int, **settings) -> RayScorers:
    settings = {"options": {"num_cpus": 0.5}, "timeout": 300.0, "start_timeout": 300.0} | settings
    return RayScorers(mortal_entry(folder, *dies_at), **settings)


def test_an_actor_answers_what_the_reward_answers(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    actor, batch = ScorerActor(PLACES, str(ROOT), []), batch_of(3)
    batch.media[1] = 0.0
    here = CheckedReward(Places()).score(batch)
    message = b"".join(pack_batch(batch, "float32", {}))
    there = output_from_json(actor.score(message), actor.declare(), 3)
    assert_close(there.values, here.values, rtol=0, atol=0, equal_nan=True)
    assert_close(there.maps["places"], here.maps["places"], rtol=0, atol=0, equal_nan=True)
    assert there.reasons == here.reasons == {1: "it is black"}


def test_an_error_of_the_model_is_an_answer(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    actor = ScorerActor(PLACES, str(ROOT), [])
    monkeypatch.setattr(actor.model.model, "score", lambda _: 1 / 0)
    message = b"".join(pack_batch(batch_of(2), "float32", {}))
    assert "ZeroDivisionError" in actor.score(message)["error"]


def test_settings_are_checked_before_anything_starts():
    assert RayScorers(PLACES).spec.dims == ("bright",)
    assert RayScorers({"class_path": "not_here.Model"}, dims=["taste"]).spec.dims == ("taste",)
    with pytest.raises(ConfigError, match="not_here"):
        RayScorers({"class_path": "not_here.Model"})
    with pytest.raises(ValueError, match="name max_restarts, which are set here"):
        RayScorers(PLACES, options={"max_restarts": 3})
    with pytest.raises(ValueError, match="must have class_path"):
        RayScorers({"path": "x"})


def test_equal_settings_name_the_same_actors():
    settings = [{}, {"actors": 2}, {"options": {"num_gpus": 0.5}}, {"restarts": 1}]
    names = [RayScorers(PLACES, **one).pool.name for one in settings]
    assert len({*names}) == len(names)
    assert RayScorers(PLACES, timeout=9.0).pool.name == names[0]


def test_several_processes_need_a_running_cluster(monkeypatch):
    unconnected = SimpleNamespace(is_initialized=lambda: False)
    monkeypatch.setattr(scorer, "prepare_ray", lambda *_: unconnected)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="`ray start --head`, and set address"):
        RayScorers(PLACES).load()


class FakeRay:
    """Ray whose answers fail."""

    error = type("RayError", (Exception,), {})
    exceptions = SimpleNamespace(RayError=error, GetTimeoutError=type("Late", (error,), {}))

    def __init__(self, answer):
        self.answer = answer

    def get(self, _, timeout):
        assert timeout == 5.0
        if isinstance(self.answer, str):
            raise getattr(self.exceptions, self.answer)("trace\nThe actor died unexpectedly")
        return self.answer


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ("RayError", RewardGone, "'places' died: The actor died unexpectedly"),
        ({"error": "reward 'places' raised"}, RewardFailure, "reward 'places' raised"),
    ],
)
def test_actors_that_cannot_answer_end_the_run(answer, error, message):
    with pytest.raises(error, match=message):
        fake_pool(answer).score(Places().spec, batch_of(2), 5.0)


def test_samples_without_an_answer_in_time_are_invalid():
    found = fake_pool("GetTimeoutError").score(Places().spec, batch_of(2), 5.0)
    assert not found.valid.any()
    assert found.reasons[1] == f"no answer of pool in 5 s {MAY_PASS}"


def fake_pool(answer) -> ScorerPool:
    pool = ScorerPool(PLACES, 1, {}, 3)
    actor = SimpleNamespace(score=SimpleNamespace(remote=lambda message: len(message)))
    pool._ray, pool.name, pool.actors, pool._next = FakeRay(answer), "pool", [actor], 3
    return pool


@pytest.mark.slow
def test_processes_share_an_actor_that_dies_and_lose_no_batch(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(sys, "executable", python())
    folder, batches = tmp_path / "calls", [batch_of(n, seed=n) for n in (3, 5, 2)]
    folder.mkdir()
    model = mortal(folder, 1)
    try:
        model.load()
        address = ray.get_runtime_context().gcs_address
        other = (
            "from pathlib import Path; from tests.rewards.test_ray_scorers import *\n"
            f"model = mortal(Path({str(folder)!r}), 1, address={address!r})\n"
            "print(json.dumps(model.score(batch_of(4)).values.tolist()))"
        )
        command = [python(), "-c", other]
        scores = [model.score(batch).values for batch in batches]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    finally:
        ray.shutdown()
    here = Mortal(str(folder), [])
    assert all(a.equal(here.score(b).values) for a, b in zip(scores, batches, strict=True))
    there = torch.tensor(json.loads(done.stdout.splitlines()[-1]))
    assert there.equal(here.score(batch_of(4)).values)
    calls = [
        file.read_text().split() for file in sorted(folder.iterdir(), key=lambda f: int(f.name))
    ]
    assert [int(size) for _, size in calls[:5]] == [3, 5, 5, 2, 4]
    assert calls[0][0] == calls[1][0] != calls[2][0] == calls[4][0], "one actor, and its restart"


@pytest.mark.slow
def test_a_run_with_actors_makes_the_updates_of_one_without(tmp_path):
    pytest.importorskip("ray")
    rows = []
    for name, files in (("here", []), ("there", ["configs/tasks/shapes_ray.yaml"])):
        command = [
            *(python(), "-m", "flowalign", "train", "configs/shapes.yaml", *files),
            *("--num_steps", "1", "--evaluation", "null", "--recipe.prompts_per_step", "2"),
            *("--recipe.rollout_batch_prompts", "1", "--output_dir", str(tmp_path / name)),
            *("--checkpoints.verify", "never"),
        ]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
        row = json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[0])
        times = ("timing/", "seconds", "cost/seconds", "throughput")
        rows.append({key: value for key, value in row.items() if not key.startswith(times)})
    assert rows[0] == rows[1]
