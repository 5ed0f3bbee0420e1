"""Sequential tests: exact tails, and a bounded rate of false alarms over whole runs."""

import math

import pytest
import torch
from scipy import stats

from flowalign.functional import degradation
from flowalign.functional.degradation import student_quantile, variance_of_laplacian
from flowalign.functional.resampling import smallest_difference


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


# The smallest difference that seeds would show: by hand, by tables, and against scipy -------------


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 14, 21, 60])
@pytest.mark.parametrize("probability", [0.6, 0.8, 0.975, 0.999])
def test_quantiles_are_those_of_scipy(probability, freedom):
    expected = stats.t.ppf(probability, freedom)
    assert student_quantile(1 - probability, freedom) == pytest.approx(expected, rel=1e-9)


def test_two_methods_of_three_seeds_are_worked_out_by_hand():
    """Variances .01 and .03, pooled .02 with freedom 4: (2.7764 + .9410) sqrt(.02) sqrt(2 / 3)."""
    first, second = [0.4, 0.5, 0.6], [0.1, 0.1 + math.sqrt(0.03), 0.1 + 2 * math.sqrt(0.03)]
    expected = (2.7764 + 0.9410) * math.sqrt(0.02) * math.sqrt(2 / 3)
    assert smallest_difference([first, second]) == pytest.approx(expected, rel=1e-4)


def test_more_methods_make_the_deviation_known_better_and_fewest_seeds_count():
    """Freedom 2 + 1 + 0 = 3, and one seed only of a method: sqrt(2 / 1)."""
    values = [[0.4, 0.5, 0.6], [0.3, 0.5], [0.9]]
    error = math.sqrt((0.02 + 0.02) / 3) * math.sqrt(2)
    expected = (3.1824 + 0.9785) * error
    assert smallest_difference(values) == pytest.approx(expected, rel=1e-4)


def test_one_seed_each_shows_nothing_and_values_that_are_missing_do_not_count():
    assert math.isnan(smallest_difference([[0.4], [0.5]]))
    assert math.isnan(smallest_difference([[0.4, 0.5], [math.nan]]))
    two = smallest_difference([[0.4, 0.6], [0.5, 0.9]])
    assert smallest_difference([[0.4, math.nan, 0.6], [0.5, 0.9, math.nan]]) == two


def test_the_difference_is_shown_in_about_eight_of_ten_comparisons():
    """By the noncentral distribution of the test: with 14 degrees of freedom, power .80."""
    spread, seeds, methods = 0.03, 3, 7
    deviation = [-spread, 0.0, spread]
    found = smallest_difference([deviation] * methods)
    freedom, shift = methods * (seeds - 1), found / (spread * math.sqrt(2 / seeds))
    power = 1 - stats.nct.cdf(stats.t.ppf(0.975, freedom), freedom, shift)
    assert power == pytest.approx(0.8, abs=0.01)


# Sharpness by hand, and what blur, noise and contrast do to it ------------------------------------


def grey(rows):
    """A clip of one frame with equal channels, so that its brightness is its values."""
    return torch.tensor(rows)[None, None, None].expand(1, 1, 3, -1, -1).double()


def checked():
    """Images of one bright square each, in different positions and sizes."""
    media = torch.full((2, 1, 3, 16, 16), 0.2, dtype=torch.float64)
    media[0, :, 0, 3:9, 4:11] = 0.9
    media[1, :, 1, 5:8, 2:14] = 0.7
    return media


def blurred(media):
    frames = torch.nn.functional.avg_pool2d(media.flatten(0, 1), 3, stride=1, padding=1)
    return frames.unflatten(0, media.shape[:2])


def test_an_edge_is_worked_out_by_hand():
    """Rows (0, 0, 1, 1): the Laplacian is 0, 1, -1, 0, its mean 0 and its variance 1 / 2."""
    found = variance_of_laplacian(grey([[0.0, 0.0, 1.0, 1.0]] * 3))
    assert found.tolist() == pytest.approx([0.5])


def test_a_point_is_worked_out_by_hand():
    """Of 3 x 3 the middle has -4, its four neighbours 1: the mean is 0, the variance 20 / 9."""
    rows = [[0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    assert variance_of_laplacian(grey(rows)).tolist() == pytest.approx([20 / 9])


def test_channels_count_by_their_brightness():
    media = torch.zeros(3, 1, 3, 3, 3, dtype=torch.float64)
    for channel in range(3):
        media[channel, :, channel, 1, 1] = 1.0
    expected = [20 / 9 * weight**2 for weight in (0.299, 0.587, 0.114)]
    assert variance_of_laplacian(media).tolist() == pytest.approx(expected)


def test_frames_of_a_clip_are_measured_one_by_one():
    """Twice the contrast is four times the variance; a frame between has no share in others."""
    point = grey([[0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    clip = torch.cat([point, 0 * point, 0.5 * point], dim=1)
    assert variance_of_laplacian(clip).tolist() == pytest.approx([20 / 9 * 1.25 / 3])


def test_blur_lowers_it_and_noise_raises_it():
    media, noise = checked(), torch.Generator().manual_seed(3)
    sharp = variance_of_laplacian(media)
    soft = variance_of_laplacian(blurred(media))
    noisy = variance_of_laplacian(
        media + 0.1 * torch.randn(media.shape, generator=noise, dtype=media.dtype)
    )
    assert (soft < 0.5 * sharp).all()
    assert (noisy > 1.5 * sharp).all()


def test_a_picture_of_one_pixel_has_no_edges():
    assert variance_of_laplacian(torch.rand(2, 1, 3, 1, 1)).tolist() == [0.0, 0.0]
