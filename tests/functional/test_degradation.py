"""Sequential tests: exact tails, and a bounded rate of false alarms over whole runs."""

import math

import pytest
import torch

from flowalign.functional import degradation


@pytest.mark.parametrize(
    ("dof", "t", "tail"),
    [  # tables of Student's t, upper tails
        (1, 1.0, 0.25),
        (1, 12.706, 0.025),
        (2, 4.303, 0.025),
        (10, 2.764, 0.01),
        (30, 3.646, 0.0005),
        (120, 1.980, 0.025),
    ],
)
def test_tails_of_student(dof, t, tail):
    upper, lower = degradation.student_tail(torch.tensor([t, -t]), dof).tolist()
    assert upper == pytest.approx(tail, rel=1e-3)
    assert upper + lower == pytest.approx(1)
    assert degradation.student_quantile(tail, dof) == pytest.approx(t, rel=1e-3)


def test_small_tails_are_accurate():
    exact = 0.5 * math.erfc(5.0 / 2**0.5)  # the normal limit
    far = float(degradation.student_tail(torch.tensor(5.0), 100_000))
    assert far == pytest.approx(exact, rel=2e-2)


def test_levels_of_a_run_add_up_to_the_false_alarm_rate():
    total = sum(4 * degradation.spend_level(0.05, e, 4) for e in range(1, 20_000))
    assert total == pytest.approx(0.05, rel=1e-3)
    assert degradation.spend_level(0.05, 1, 4) == pytest.approx(0.0076, abs=1e-4)
    assert degradation.spend_level(0.05, 10, 4) == pytest.approx(7.6e-5, abs=1e-6)


def test_p_values_by_hand():
    d = torch.tensor([-3.0, -1.0])  # mean -2, standard error 1: t = -2 with one degree of freedom
    assert degradation.lower_p(d) == pytest.approx(0.5 - math.atan(2) / math.pi)
    assert degradation.lower_p(d, tolerance=2.0) == pytest.approx(0.5)
    assert degradation.lower_p(torch.tensor([-1.0, -1.0])) == 0
    assert degradation.lower_p(torch.tensor([0.0, 0.0])) == 1
    assert degradation.lower_p(torch.tensor([-1.0])) == 1
    assert degradation.lower_bound(d, 0.25) == pytest.approx(-3.0)


def test_skewness_is_corrected_by_hand_and_only_against_alarms():
    """Mean 1, second and third central moments 3 and 6: t = 1, a = 6 / 3^1.5 / 2 = 1 / sqrt(3)."""
    d, a = torch.tensor([4.0, 0.0, 0.0, 0.0]), 3**-0.5
    assert float(degradation.corrected_t(d)) == pytest.approx(1 + a / 3 + a**2 / 27 + a / 6)
    assert float(degradation.corrected_t(-d)) == pytest.approx(-1)  # Hall: -1 - a / 3 - ... is less


def test_skewed_differences_give_few_false_alarms():
    g = torch.Generator().manual_seed(0)
    skewed = torch.empty(40_000, 48).exponential_(generator=g) - 1
    limit, plain = (
        -degradation.student_quantile(0.0015, 47),
        skewed.mean(1) / skewed.std(1) * 48**0.5,
    )
    rates = [float((t < limit).float().mean()) for t in (plain, degradation.corrected_t(skewed))]
    assert rates[0] > 6 * 0.0015
    assert rates[1] < 2.5 * 0.0015


def test_a_whole_run_has_few_false_alarms_and_sees_a_fall():
    """1,000 runs of 20 evaluations; metrics share some of their noise, evaluations most of it."""
    g = torch.Generator().manual_seed(0)
    runs, evaluations, prompts, metrics = 1000, 20, 32, 4
    prompt = torch.randn(runs, 1, 1, prompts, generator=g)
    shared = 0.8 * torch.randn(runs, 1, metrics, prompts, generator=g) + 0.6 * prompt
    own = torch.randn(runs, evaluations, metrics, prompts, generator=g)
    t = degradation.corrected_t(0.9 * shared + 0.44 * own)
    levels = [degradation.spend_level(0.05, e, metrics) for e in range(1, evaluations + 1)]
    limits = torch.tensor([degradation.student_quantile(level, prompts - 1) for level in levels])
    alarms = (t < -limits[None, :, None]).any(2)
    assert float(alarms.any(1).float().mean()) <= 0.05
    fall = t - torch.arange(evaluations)[None, :, None] * 0.2 * prompts**0.5  # 0.2 std per step
    detected = (fall < -limits[None, :, None]).any(2)
    assert float(detected[:, 8].float().mean()) >= 0.95
