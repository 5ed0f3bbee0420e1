"""Figures of probes of known gradients: ranking, errors, and recommendations."""

import pytest
import torch

from flowalign.functional.signal import best_weights, cross_fit, moments
from flowalign.studies.probe.figures import (
    comparison,
    drift,
    rank,
    recommend,
    recommend_weights,
    summary,
)
from tests.fixtures.probes import new_judged

EARLY = [[8.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]]
LATE = EARLY[::-1]
NOTHING = [[0.0] * 4] * 3


def test_the_summary_has_both_metrics_costs_and_the_clip(tmp_path):
    judged = new_judged(tmp_path, "one", EARLY)
    found = summary(judged.setting, judged.probe)
    assert found["a_batch"] == {
        "network_evaluations": 1000,
        "reward_calls": 96,
        "decodes": 96,
        "seconds": 2,
    }
    for metric, products in (("gradient", judged.probe.gradient), ("update", judged.probe.update)):
        truth = moments(products)
        steps = found[metric]["steps"]
        assert [s["signal"] for s in steps] == pytest.approx(truth.signal.diagonal().tolist())
        assert [s["best_weight"] for s in steps] == best_weights(truth).tolist()
        assert all(s["signal_error"] > 0 < s["noise_error"] for s in steps)
    row = found["gradient"]["signal_to_noise"]["best weights"]
    assert row["value"] == pytest.approx(float(cross_fit(judged.probe.gradient)))
    assert row["per"]["network_evaluations"] == pytest.approx(row["value"])
    assert row["per"]["reward_calls"] == pytest.approx(row["value"] * 1000 / 96)
    assert row["per"]["seconds"] == pytest.approx(row["value"] * 30)
    assert found["clip"]["share"] == 1
    assert len(found["gradient"]["step_weight"]) == 4


def test_the_ranking_is_by_signal_for_evaluations_and_not_for_batches(tmp_path):
    dear = new_judged(tmp_path, "dear", EARLY, evaluations=10_000)
    cheap = new_judged(tmp_path, "cheap", EARLY, seed=1)
    rows = rank([dear, cheap])
    assert [row["name"] for row in rows] == ["cheap", "dear"]
    assert rows[0]["behind"] is None
    assert not rows[1]["within_error"]
    gap = rows[0]["per_1000_evaluations"]["value"] - rows[1]["per_1000_evaluations"]["value"]
    assert rows[1]["behind"]["value"] == pytest.approx(gap)


def test_noise_that_two_settings_share_is_no_error_of_their_difference(tmp_path):
    """The same batches at two prices: nothing but the price differs."""
    one, other = (new_judged(tmp_path, name, EARLY, seed=3) for name in ("one", "other"))
    row = rank([one, other])[1]
    assert row["behind"] == {"value": 0.0, "error": 0.0}
    apart = rank([one, new_judged(tmp_path, "apart", EARLY, seed=4)])[1]
    assert apart["behind"]["error"] > 0


@pytest.mark.slow
def test_weights_of_noise_are_not_recommended_on_average(tmp_path):
    """Judged by other batches, they show more than equal weights about every other time."""
    found = [recommend_weights(new_judged(tmp_path, "x", NOTHING, seed=k)) for k in range(30)]
    assert 4 < sum(weights is not None for weights in found) < 26
    assert all(any(weights) for weights in found if weights)


@pytest.mark.slow
def test_recommended_are_the_best_weights_of_the_best_setting_at_the_last_weights(tmp_path):
    judged = [
        new_judged(tmp_path, "early", EARLY, "step-000010", evaluations=10),
        new_judged(tmp_path, "early", EARLY, "step-000020"),
        new_judged(tmp_path, "nothing", NOTHING, "step-000020"),
    ]
    best = recommend(judged)
    assert best is judged[1]
    weights = recommend_weights(best)
    assert weights[0] == 1
    assert max(weights[1:]) < 0.5
    assert comparison(judged)["recommended"] == {
        "name": "early step-000020",
        "step_weight": weights,
    }


def test_weights_that_drift_are_worth_less_than_new_ones(tmp_path):
    before = new_judged(tmp_path, "one", EARLY, "step-000010")
    after = new_judged(tmp_path, "one", LATE, "step-000020", seed=1)
    same = new_judged(tmp_path, "one", EARLY, "step-000030", seed=2)
    other = new_judged(tmp_path, "other", EARLY, "step-000010")
    moved, stayed, _ = drift([before, after, same, other])
    assert (moved["from"], moved["to"]) == ("one step-000010", "one step-000020")
    assert moved["kept"]["value"] < 0.3 * moved["renewed"]["value"]
    assert not moved["within_error"]
    assert stayed["within_error"]


@pytest.mark.slow
def test_intervals_of_the_best_weights_hold_what_these_weights_are_worth(tmp_path):
    """Of 100 intervals of two standard errors, at least 85 hold the truth of weights so found.

    The truth is that of weights from halves of eight batches, over 200 other probes.
    """
    mean = torch.tensor(EARLY).double()

    def worth(weights):
        return (weights @ mean).square().sum() / (4 * weights.square().sum())

    def halves(judged):
        parts = (torch.arange(16) % 2 == k for k in (0, 1))
        return [best_weights(moments(judged.products, part)) for part in parts]

    others = [halves(new_judged(tmp_path, "x", EARLY, seed=1000 + k)) for k in range(200)]
    truth = torch.stack([worth(w) for pair in others for w in pair]).mean()
    found = [new_judged(tmp_path, "x", EARLY, seed=k).best for k in range(100)]
    covered = sum(bool((one.value - truth).abs() < 2 * one.error) for one in found)
    assert 85 <= covered <= 100
    spread = torch.stack([one.value for one in found]).std()
    assert torch.stack([one.error for one in found]).mean() == pytest.approx(float(spread), rel=0.4)
