"""The calibration loop on gains with known probabilities: output, resuming and errors."""

import json
import math
from dataclasses import asdict

import pytest
import torch
from torch.testing import assert_close

from flowalign.data.requests import Requests
from flowalign.functional.noise_calibration import initial_levels
from flowalign.functional.transition import DanceSDE
from flowalign.reports.run_report import calibration_charts
from flowalign.sampling.calibration import Calibration, calibrate, read_calibration
from flowalign.sampling.sampling_settings import Sampling
from flowalign.training.policy_gradient.calibrate import draws
from flowalign.types import plain_requests

SIGMAS = torch.tensor([1.0, 0.9, 0.7, 0.3, 0.0])
ROOTS = torch.tensor([1.2, 0.8, 0.05, 1.0], dtype=torch.float64)
"""Levels of 40 % positive gains. The last step is an ODE step."""
IDENTITY = {"seed": 3, "model": "m", "window": (0, 3)}


def cfg(**changes):
    return Calibration(**{"num_samples": 30, "iterations": 6} | changes)


class Gains:
    """+-1 with P(+1) = 1 / (1 + 1.5 (psi / root)^4), or whatever `broken` makes of them."""

    def __init__(self, num_samples=30, stop_at=None, broken=lambda gains, iteration: gains):
        self.num_samples, self.stop_at, self.broken = num_samples, stop_at, broken
        self.asked = []

    def __call__(self, psi, iteration):
        if iteration == self.stop_at:
            raise KeyboardInterrupt
        self.asked.append(iteration)
        generator = torch.Generator().manual_seed(iteration)
        shape = (self.num_samples, len(psi))
        u = torch.rand(shape, generator=generator, dtype=torch.float64)
        gains = 2.0 * (u < 1 / (1 + 1.5 * (psi / ROOTS) ** 4)) - 1
        gains[:, -1] = math.nan
        return self.broken(gains, iteration)


# What it finds ------------------------------------------------------------------------------------


def test_levels_are_found_step_by_step(tmp_path):
    large = cfg(num_samples=2000, iterations=40)
    history = calibrate(large, Gains(2000), SIGMAS, 0.7, tmp_path / "psi.json", IDENTITY)
    assert_close(torch.tensor(history.psi[:3], dtype=torch.float64), ROOTS[:3], rtol=0.03, atol=0)


def test_the_rate_of_the_damped_rule_falls_with_the_iteration(tmp_path):
    """All gains lost: log psi falls by (1 - .2) / (1 + i / 10)."""
    lost = Gains(broken=lambda gains, iteration: -gains.abs())
    rows = calibrate(cfg(), lost, SIGMAS, 0.7, tmp_path / "psi.json", IDENTITY).iterations
    psi = torch.tensor([row.psi[:3] for row in rows], dtype=torch.float64)
    expected = -0.8 / (1 + torch.arange(5, dtype=torch.float64) / 10)
    assert_close(psi.log().diff(dim=0), expected[:, None].expand(-1, 3))


@pytest.mark.parametrize("rule", ["damped", "paper"])
def test_a_step_that_is_never_stochastic_keeps_its_initial_level(tmp_path, rule):
    history = calibrate(cfg(rule=rule), Gains(), SIGMAS, 0.7, tmp_path / "psi.json", IDENTITY)
    initial = initial_levels(SIGMAS, 0.7).tolist()
    assert history.psi[-1] == initial[-1]
    assert all(a != b for a, b in zip(history.psi[:-1], initial[:-1], strict=True))
    assert {row.valid[-1] for row in history.iterations} == {0}


def test_failed_rewards_count_on_no_side_and_a_step_without_any_reward_stays(tmp_path):
    def broken(gains, iteration):
        gains[:4, 0] = math.nan
        gains[4:9, 1] = 0.0
        if iteration == 1:
            gains[:, 2] = math.nan
        return gains

    history = calibrate(cfg(), Gains(broken=broken), SIGMAS, 0.7, tmp_path / "psi.json", IDENTITY)
    rows = history.iterations
    assert {row.valid[0] for row in rows} == {26}
    assert {row.ties[1] for row in rows} == {5}
    assert rows[2].psi[2] == rows[1].psi[2] != rows[0].psi[2]
    assert all(math.isfinite(psi) for psi in history.psi)


@pytest.mark.parametrize(("rule", "step"), [("damped", 1.0), ("paper", 0.2)])
def test_the_floor_holds_from_the_start(tmp_path, rule, step):
    high = cfg(rule=rule, step=step, floor=1.1, iterations=10)
    history = calibrate(high, Gains(), SIGMAS, 0.7, tmp_path / "psi.json", IDENTITY)
    assert min(min(row.psi) for row in history.iterations) == 1.1
    assert history.psi[2] == 1.1


@pytest.mark.parametrize(("rule", "step"), [("damped", 1.0), ("paper", 0.2)])
def test_the_ceiling_holds_where_noise_never_hurts(tmp_path, rule, step):
    """All ties: the damped rule rises by its tolerance, the paper's by its step."""
    blind = Gains(broken=lambda gains, iteration: gains * 0)
    capped = cfg(rule=rule, step=step, ceiling=0.9, iterations=10)
    history = calibrate(capped, blind, SIGMAS, 0.7, tmp_path / "psi.json", IDENTITY)
    expected = [*initial_levels(SIGMAS, 0.9).tolist()[:3], initial_levels(SIGMAS, 0.7).tolist()[3]]
    assert history.psi == expected


# Its file -----------------------------------------------------------------------------------------


def test_the_file_says_what_made_it(tmp_path):
    file = tmp_path / "new" / "psi.json"
    history = calibrate(cfg(), Gains(), SIGMAS, 0.7, file, IDENTITY)
    content = json.loads(file.read_text())
    assert content["settings"] == {
        "rule": "damped",
        "num_samples": 30,
        "threshold": 0.2,
        "step": 1.0,
        "floor": 0.001,
        "ceiling": 1.0,
    }
    assert content["identity"] == {"seed": 3, "model": "m", "window": [0, 3], "eta": 0.7}
    assert content["sigmas"] == [1.0, 0.9, 0.7, 0.3, 0.0]
    assert content["psi"] == history.psi
    first = content["iterations"][0]
    assert first["psi"] == initial_levels(SIGMAS, 0.7).tolist()
    assert [row["iteration"] for row in content["iterations"]] == list(range(6))
    assert read_calibration(file) == history
    assert list(file.parent.iterdir()) == [file]


def test_the_same_settings_make_the_same_file(tmp_path):
    for name in ("a", "b"):
        calibrate(cfg(), Gains(), SIGMAS, 0.7, tmp_path / name, IDENTITY)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("rule", ["damped", "paper"])
@pytest.mark.parametrize("killed", [1, 4])
def test_a_killed_calibration_goes_on_bit_for_bit(tmp_path, rule, killed):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    calibrate(cfg(rule=rule), Gains(), SIGMAS, 0.7, whole, IDENTITY)
    with pytest.raises(KeyboardInterrupt):
        calibrate(cfg(rule=rule), Gains(stop_at=killed), SIGMAS, 0.7, parts, IDENTITY)
    assert len(read_calibration(parts).iterations) == killed
    rest = Gains()
    calibrate(cfg(rule=rule), rest, SIGMAS, 0.7, parts, IDENTITY)
    assert rest.asked == list(range(killed, 6))
    assert parts.read_bytes() == whole.read_bytes()


def test_a_finished_calibration_is_read_and_can_be_lengthened(tmp_path):
    file, longer = tmp_path / "psi.json", tmp_path / "longer.json"
    history = calibrate(cfg(), Gains(), SIGMAS, 0.7, file, IDENTITY)
    again = Gains()
    assert calibrate(cfg(), again, SIGMAS, 0.7, file, IDENTITY) == history
    assert again.asked == []
    calibrate(cfg(iterations=9), Gains(), SIGMAS, 0.7, file, IDENTITY)
    calibrate(cfg(iterations=9), Gains(), SIGMAS, 0.7, longer, IDENTITY)
    assert file.read_bytes() == longer.read_bytes()
    with pytest.raises(ValueError, match=r"iterations is 6, but .* holds 9"):
        calibrate(cfg(), Gains(), SIGMAS, 0.7, file, IDENTITY)


@pytest.mark.parametrize(
    ("changes", "sigmas", "identity", "message"),
    [
        ({"floor": 0.002}, SIGMAS, IDENTITY, r"calibration\.floor 0\.001 \(now 0\.002\)"),
        ({"rule": "paper"}, SIGMAS, IDENTITY, r"calibration\.rule 'damped' \(now 'paper'\)"),
        ({}, SIGMAS[[0, 1, 2, 4]], IDENTITY, "sigmas"),
        ({}, SIGMAS, IDENTITY | {"seed": 4}, r"seed 3 \(now 4\)"),
        ({}, SIGMAS, IDENTITY | {"guidance": 4.5}, r"guidance None \(now 4\.5\)"),
        ({}, SIGMAS, {"seed": 3, "model": "m"}, r"window \[0, 3\] \(now None\)"),
    ],
)
def test_a_file_with_other_settings_is_refused_and_kept(
    tmp_path, changes, sigmas, identity, message
):
    file, asked = tmp_path / "psi.json", Gains()
    calibrate(cfg(iterations=1), Gains(), SIGMAS, 0.7, file, IDENTITY)
    before = file.read_bytes()
    with pytest.raises(ValueError, match=message):
        calibrate(cfg(**changes), asked, sigmas, 0.7, file, identity)
    assert asked.asked == []
    assert file.read_bytes() == before


@pytest.mark.parametrize("text", ["", "{", "[]", '{"iterations": []}', '{"iterations": [{}]}'])
def test_a_file_that_holds_no_calibration_is_refused(tmp_path, text):
    file = tmp_path / "psi.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"psi\.json holds no calibration"):
        calibrate(cfg(), Gains(), SIGMAS, 0.7, file, IDENTITY)


def test_only_one_process_writes(tmp_path):
    file = tmp_path / "psi.json"
    other = calibrate(cfg(), Gains(), SIGMAS, 0.7, file, IDENTITY, writes=False)
    assert not file.exists()
    assert other == calibrate(cfg(), Gains(), SIGMAS, 0.7, file, IDENTITY)


# Settings and draws -------------------------------------------------------------------------------


def test_a_threshold_of_the_damped_rule_is_a_share():
    with pytest.raises(ValueError, match=r"threshold is 1\.0; the damped rule takes a share"):
        cfg(threshold=1.0)


def test_an_unknown_rule_is_refused():
    """Here the type checker sees it first; outside of tests there is none."""
    wrong = cfg()
    object.__setattr__(wrong, "rule", "best")
    with pytest.raises(ValueError, match="rule is 'best'; it must be one of damped, paper"):
        wrong.__post_init__()


def test_each_rule_has_its_own_defaults():
    found = {rule: Calibration(rule=rule).settings() for rule in ("damped", "paper")}
    assert [(s["threshold"], s["step"]) for s in found.values()] == [(0.2, 1.0), (2.0, 0.01)]
    assert [s["ceiling"] for s in found.values()] == [1.0, None]
    assert Calibration(rule="paper", threshold=9.0, step=0.5).settings()["threshold"] == 9


def test_sampling_takes_the_levels_of_a_schedule_that_stays_near_pure_noise():
    """Twenty steps with shift 12."""
    plain = torch.linspace(1, 0, 21)
    levels = initial_levels(12 * plain / (1 + 11 * plain), 0.7).tolist()
    assert max(levels) > 10
    assert Sampling(num_steps=20, kernel=DanceSDE(), eta=levels).eta == levels
    with pytest.raises(ValueError, match="eta is 11"):
        Sampling(eta=11.0)


def test_every_sample_has_its_own_prompt_and_noise():
    texts = [f"prompt {i}" for i in range(12)]

    def noise(seed, iteration):
        chosen, generators = draws(Requests(plain_requests(texts), seed), seed, iteration, 4)
        return chosen, [float(torch.randn((), generator=g)) for g in generators]

    found = [noise(5, i) for i in range(3)]
    assert sorted(request.prompt for asked, _ in found for request in asked) == sorted(texts)
    assert len({z for _, drawn in found for z in drawn}) == 12
    assert noise(5, 2) == found[2] != noise(6, 2)


# Its picture --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "aim"), [("damped", " (aim: 40%)"), ("paper", "")])
def test_the_charts_name_their_axes_and_their_lines(tmp_path, rule, aim):
    history = calibrate(cfg(rule=rule), Gains(), SIGMAS, 0.7, tmp_path / "psi.json", IDENTITY)
    levels, shares = calibration_charts(asdict(history))
    named = [[line.label for line in chart.lines if not line.faint] for chart in (levels, shares)]
    assert named == [["initial", "after 6 iterations"], ["first", "last"]]
    assert levels.log
    assert list(levels.lines[-1].y) == [history.psi[k] for k in levels.lines[-1].x]
    assert shares.title == f"Share of gains above 0{aim}"
    assert shares.y_marks == ([0.5, 0.4] if aim else [0.5])
    assert {levels.x_label, shares.x_label} == {"denoising step"}


def test_a_calibration_without_gains_has_no_picture(tmp_path):
    nothing = Gains(broken=lambda gains, iteration: gains * math.nan)
    history = calibrate(cfg(), nothing, SIGMAS, 0.7, tmp_path / "psi.json", IDENTITY)
    assert calibration_charts(asdict(history)) == []
