"""Hacking detection: verdicts by hand, and runs that warn, stop or return to the best weights."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch

from flowalign.functional.degradation import dark_share, grid_power
from flowalign.rewards.composite import Rewards
from flowalign.rewards.config import WeightedReward
from flowalign.training.divergence import measure_divergence
from flowalign.training.held_out_evaluation import Evaluation
from flowalign.training.learner import Optimizer
from flowalign.training.watch import HackingMonitor, Watch, judge, measure_panel
from flowalign.types import RewardModel, RewardOutput, RewardSpec, plain_requests
from tests.fixtures.pixel import PixelPolicy, Redness
from tests.fixtures.small_run import go, new_run


def panel(optimised, watched, name="quality", n=16):
    """Differences around a mean, with a spread of 0.1."""
    spread = 0.1 * torch.linspace(-1, 1, n).double()
    return {"optimised": optimised + spread, name: watched + spread.flip(0)}


START = {"optimised": torch.zeros(16).double(), "quality": torch.linspace(0, 1, 16).double()}


def test_an_alarm_needs_a_fall_that_the_optimised_reward_does_not_share():
    cfg = Watch(metrics=["quality"])
    base = START
    cases = ((0.5, -0.5, True), (0.5, 0.0, False), (0.0, -0.5, True), (-0.5, -0.5, False))
    for up, down, alarm in cases:
        now = panel(up, base["quality"] + down)
        verdict = judge(cfg, base, now, 1, 10)
        assert bool(verdict.alarm) == alarm
        assert verdict.healthy == (down == 0)
        assert (verdict.gain > 0) == (up > 0)


def test_falls_within_the_tolerance_and_later_weak_falls_raise_no_alarm():
    spread = float(START["quality"].std(correction=0))
    now = panel(0.5, START["quality"] - 0.15)
    assert judge(Watch(metrics=["quality"], tolerance=0.1), START, now, 1, 1).alarm
    allowed = 0.15 / spread
    assert not judge(Watch(metrics=["quality"], tolerance=allowed), START, now, 1, 1).alarm
    weak = panel(0.5, START["quality"] - 0.07)
    cfg = Watch(metrics=["quality"], tolerance=0.0)
    assert judge(cfg, START, weak, 1, 1).alarm
    assert not judge(cfg, START, weak, 40, 1).alarm


def test_sharpness_is_tested_in_both_directions_and_artefacts_upwards():
    one = {"optimised": torch.zeros(16).double(), "sharpness": torch.full((16,), 0.1).double()}
    cfg = Watch(metrics=["sharpness"])
    wobble = 1 + 0.01 * torch.linspace(-1, 1, 16).double()
    for factor, alarm in ((0.5, True), (2.0, True), (1.1, False), (0.95, False)):
        now = {"optimised": panel(1.0, 0)["optimised"], "sharpness": 0.1 * factor * wobble}
        assert bool(judge(cfg, one, now, 1, 1).alarm) == alarm
    grid = {"optimised": torch.zeros(16).double(), "grid_power": START["quality"]}
    for change, alarm in ((0.8, True), (-0.8, False)):
        now = panel(1.0, START["quality"] + change, "grid_power")
        assert bool(judge(Watch(metrics=["grid_power"]), grid, now, 1, 1).alarm) == alarm


def test_kl_is_tested_against_its_limit():
    base = {"optimised": torch.zeros(16).double(), "kl": torch.zeros(16).double()}
    cfg = Watch(metrics=["kl"], kl_limit=0.2)
    for level, alarm in ((0.1, False), (0.2, False), (0.4, True)):
        now = panel(1.0, torch.tensor(level), "kl")
        verdict = judge(cfg, base, now, 1, 1)
        assert bool(verdict.alarm) == alarm
    for metrics, limit in ((["kl"], None), (["diversity"], 0.2)):
        with pytest.raises(ValueError, match="kl_limit is"):
            Watch(metrics=metrics, kl_limit=limit)


def test_the_divergence_is_a_mean_over_noise_levels_that_every_sample_visits():
    policy = PixelPolicy()
    policy.denoiser = torch.nn.Linear(5, 3)
    policy.denoiser.requires_grad_(False).weight.zero_()
    reference = copy.deepcopy(policy)
    policy.denoiser.weight[:, 3] = torch.tensor([1.0, 2.0, 2.0])  # velocity plus (1, 2, 2) sigma
    requests, latents = plain_requests(["a", "bb", "a"]), torch.randn(3, 3)
    found = measure_divergence(policy, reference, requests, latents, [0, 1, 2], 7, 2)
    squares = (0.125**2 + 0.375**2 + 0.625**2 + 0.875**2) / 4
    assert found.tolist() == pytest.approx([3 * squares] * 3, rel=1e-5)


def test_failed_scores_are_left_out_as_pairs():
    now = panel(0.5, START["quality"] - 0.5)
    now["quality"][3] = math.nan
    verdict = judge(Watch(metrics=["quality"]), START, now, 1, 1)
    assert verdict.alarm == ["quality"]


def test_a_panel_has_one_value_per_request():
    requests = plain_requests(["a", "b", "a"])
    columns = {"redness": torch.tensor([1.0, 2.0, 3.0]), "green": torch.tensor([0.0, 1.0, 1.0])}
    latents = torch.tensor([[0.0, 0.0], [9.0, 9.0], [3.0, 4.0]])
    cfg = Watch(metrics=["green", "diversity"])
    weighted = Rewards([Redness()], {"redness": 0.5})
    found = measure_panel(cfg, requests, columns, weighted, latents)
    assert found["optimised"].tolist() == [1.0, 1.0]
    assert found["green"].tolist() == [0.5, 1.0]
    assert found["diversity"][0] == 5
    assert found["diversity"][1].isnan()


def test_grids_and_darkness():
    g = torch.Generator().manual_seed(0)
    noise = 0.5 + 0.1 * torch.randn(4, 1, 3, 64, 64, generator=g)
    grid = noise.clone()
    grid[..., ::8] += 0.3
    smooth = 0.5 + 0.3 * torch.linspace(-1, 1, 64).expand(4, 1, 3, 64, 64)
    assert (grid_power(grid) > grid_power(noise) + 0.5).all()
    assert (grid_power(smooth) < 0.3).all()
    half = torch.zeros(1, 1, 3, 4, 4)
    half[..., :2] = 1
    assert dark_share(half).item() == 0.5


@pytest.mark.parametrize(
    ("cfg", "weights", "every", "expected"),
    [
        (Watch(metrics=["a"]), {"a": 1.0}, 1, "without a weight, unlike 'a'"),
        (Watch(metrics=["b"]), {"a": 1.0}, 1, "must measure each without a weight, unlike 'b'"),
        (Watch(metrics=["a"]), {"a": 0.0}, 1, "needs a reward with a weight"),
        (Watch(metrics=["diversity"]), {"a": 1.0}, 0, "set evaluation.every"),
    ],
)
def test_what_a_run_cannot_watch_is_refused(cfg, weights, every, expected):
    with pytest.raises(ValueError, match=expected):
        cfg.check(weights, every)
    with pytest.raises(ValueError, match="name each metric once"):
        Watch(metrics=[])


def test_diversity_needs_two_samples_of_a_prompt(tmp_path):
    (tmp_path / "two.txt").write_text("a\nb")
    (tmp_path / "three.txt").write_text("c\nd\ne")
    files = {name: str(tmp_path / f"{name}.txt") for name in ("two", "three")}
    told = {"every": 1, "watch": Watch(metrics=["diversity"])}
    Evaluation(prompts=files, num_prompts=6, **told).check_watch({"x": 1.0})
    for too_few in (2, 4):
        with pytest.raises(ValueError, match=r"set evaluation\.num_prompts to 6"):
            Evaluation(prompts=files, num_prompts=too_few, **told).check_watch({"x": 1.0})


def test_the_monitor_resumes_and_names_the_best_evaluation(tmp_path):
    monitor = HackingMonitor(Watch(metrics=["quality"]), tmp_path)
    assert monitor.update(0, START) is None
    for done, up, down in ((1, 0.2, 0.0), (2, 0.5, 0.0), (3, 0.9, -0.5)):
        monitor.update(done, panel(up, START["quality"] + down))
    assert monitor.best.done == 2
    assert monitor.alarmed.done == 3
    again = HackingMonitor(monitor.cfg, tmp_path)
    again.resume(2)
    assert [one.done for one in again.verdicts] == [1, 2]
    assert again.verdicts == monitor.verdicts[:2]
    assert again.update(2, panel(0, 0)) is None
    assert json.loads((tmp_path / "watch.json").read_text())["alarm_after"] == 3


class Pale(RewardModel):
    """Minus red: what falls while redness rises."""

    def __init__(self):
        self.spec = RewardSpec("pale", ("pale",), "image", (-1.0, 0.0), "Apache-2.0")

    def score(self, batch):
        return RewardOutput.build(self.spec, -batch.media[:, :, :1].mean((1, 3, 4)), {})


def hacking_run(folder, on_hacking, tmp_path):
    prompts = tmp_path / "held_out.txt"
    prompts.write_text("\n".join("x" * k for k in range(1, 25)))
    run = new_run(folder, num_steps=6)
    evaluation = Evaluation(
        prompts={"all": str(prompts)},
        num_prompts=24,
        num_steps=2,
        every=1,
        watch=Watch(metrics=["pale", "kl"], on_hacking=on_hacking, tolerance=0.0, kl_limit=1e3),
    )
    return replace(
        run,
        evaluation=evaluation,
        rewards=[*run.rewards, WeightedReward(Pale(), {})],
        optimizer=Optimizer(learning_rate=0.05),
    )


@pytest.mark.slow
@pytest.mark.parametrize("on_hacking", ["warn", "stop", "roll_back"])
def test_a_run_that_is_hacked_warns_stops_or_rolls_back(tmp_path, on_hacking):
    folder = tmp_path / "run"
    events = tmp_path / "events.jsonl"
    run = hacking_run(folder, on_hacking, tmp_path)
    summary = go(replace(run, notify=["tee", "-a", str(events)]))
    hacking = summary["hacking"]
    told = [json.loads(line) for line in events.read_text().splitlines()]
    assert {row["event"] for row in told} == {"hacking"}
    assert told[0]["step"] == hacking["alarm_after"]
    assert hacking["fell"] == ["pale"]
    alarm = hacking["alarm_after"]
    assert 1 <= alarm < 6
    assert (
        summary["steps"]
        == {"warn": 6, "stop": alarm, "roll_back": hacking["best_after"] or 0}[on_hacking]
    )
    saved = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert saved[-1] == f"step-{summary['steps']:06d}"
    (best,) = (folder / "best").iterdir()
    assert best.name == f"step-{hacking['best_after'] or 0:06d}"
    if on_hacking == "roll_back" and not hacking["best_after"]:
        assert summary["after"] == summary["before"]
