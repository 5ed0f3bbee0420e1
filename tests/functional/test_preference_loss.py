"""Preference losses of matching errors against arithmetic by hand and recorded numbers."""

import math
from math import exp, log, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor
from torch.testing import assert_close

from flowalign.functional.preference_loss import (
    auto_beta,
    balancing_scale,
    best_and_worst,
    beyond_scores,
    exponential_weight,
    hinge_link,
    implicit_margin,
    ipo_link,
    kto,
    kto_baseline,
    linear_dpo,
    linear_weight,
    loser_scale,
    mapo,
    mapo_likelihood,
    mapo_margin,
    relative_gap,
    scale_row_gradients,
    segment_margin,
    sigmoid_link,
    step_dpo,
    weighted_score,
)
from tests.fixtures.golden import load

# Of two pairs: winners .30 and .62, losers .50 and .41.
POLICY = tensor([0.30, 0.62, 0.50, 0.41])
REFERENCE = tensor([0.34, 0.60, 0.45, 0.44])


def gradient(of, at):
    return torch.autograd.grad(of.sum(), at)[0]


def test_the_gap_is_the_rise_of_the_winner_s_error_less_that_of_the_loser():
    """-.04 - .05, and .02 + .03."""
    assert_close(relative_gap(POLICY, REFERENCE), tensor([-0.09, 0.05]))


def test_the_gap_of_frames_is_that_of_each():
    frames = torch.stack([POLICY, POLICY.flip(0)], 1)
    flat = torch.stack([REFERENCE, REFERENCE.flip(0)], 1)
    assert_close(relative_gap(frames, flat), tensor([[-0.09, -0.05], [0.05, 0.09]]))


def test_the_margin_has_half_of_beta_and_favours_winners_that_fit_better():
    assert_close(implicit_margin(tensor([-0.09, 0.05]), 40.0), tensor([1.8, -1.0]))


def test_links_by_hand():
    z = tensor([1.8, -1.0])
    assert_close(sigmoid_link(z), tensor([log(1 + exp(-1.8)), log(1 + math.e)]))
    assert_close(hinge_link(z), tensor([0.0, 2.0]))
    assert_close(ipo_link(z), tensor([1.69, 2.25]))


def test_smoothing_mixes_in_the_loss_of_the_other_label():
    z = tensor([1.8, -1.0])
    wanted = 0.9 * sigmoid_link(z) + 0.1 * sigmoid_link(-z)
    assert_close(sigmoid_link(z, 0.1), wanted)


def test_smoothing_stops_the_margin_at_the_logit_of_a_right_label():
    z = tensor([log(9.0), log(9.0) - 0.1, log(9.0) + 0.1], requires_grad=True)
    at, before, beyond = gradient(sigmoid_link(z, 0.1), z)
    assert_close(at, tensor(0.0), atol=1e-6, rtol=0.0)
    assert before < -1e-3
    assert beyond > 1e-3


@pytest.mark.parametrize("z", [-1e4, 1e4])
def test_the_sigmoid_link_is_finite_however_large_the_margin(z):
    margin = tensor([z], requires_grad=True)
    loss = sigmoid_link(margin, 0.1)
    assert loss.isfinite()
    assert gradient(loss, margin).isfinite()


def test_ipo_is_beta_squared_times_the_loss_of_the_unscaled_margin():
    """As published for log-ratios h: (h - 1/(2 beta))^2, with h = -gap / 2."""
    gap, beta = tensor([-0.09, 0.05]), 7.0
    published = (-gap / 2 - 1 / (2 * beta)).square()
    assert_close(ipo_link(implicit_margin(gap, beta)), beta**2 * published)


def test_scores_of_other_dimensions_take_from_the_margin():
    """(1.8 - .6) / .5 and (-1 + .4) / .5."""
    z = beyond_scores(tensor([1.8, -1.0]), tensor([0.6, -0.4]), 0.5)
    assert_close(z, tensor([2.4, -1.2]))


def test_weighted_scores_by_hand_with_the_unknown_staying_unknown():
    scores = {
        "text": tensor([1.0, nan, -2.0]),
        "motion": tensor([10.0, 20.0, 30.0]),
        "unused": tensor([nan, nan, nan]),
    }
    total = weighted_score(scores, {"text": 3.0, "motion": 0.1})
    assert_close(total, tensor([4.0, nan, -3.0]), equal_nan=True)


def test_a_score_nobody_gave_is_refused_by_name():
    with pytest.raises(ValueError, match=r"no scores \['sound'\]; the data has \['motion'\]"):
        weighted_score({"motion": tensor([1.0])}, {"motion": 1.0, "sound": 2.0})


@given(st.floats(1e-5, 1.0), st.floats(0.05, 0.45))
def test_auto_beta_leaves_a_typical_right_pair_the_target_share_of_its_gradient(gap, target):
    z = implicit_margin(tensor([-gap], dtype=torch.float64), auto_beta(gap, target))
    assert (-z).sigmoid().item() == pytest.approx(target)


def test_auto_beta_by_hand():
    """2 log 4 / .01."""
    assert auto_beta(0.01, 0.2) == pytest.approx(277.2589)
    assert auto_beta(0.0, 0.2) == math.inf


def test_segments_by_hand():
    """-20 (1 * .02 - 1 * .05) / 2 and -20 (-.03) / 1, ties at any size left out."""
    gap = tensor([[0.02, 9.0, 0.05], [-0.03, 7.0, 8.0], [1.0, 2.0, 3.0]])
    labels = tensor([[1.0, 0.0, -1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert_close(segment_margin(gap, labels, 40.0), tensor([0.3, 0.6, 0.0]))


def test_segments_all_for_the_winner_are_the_margin_of_the_whole():
    gap = tensor([[0.02, 0.07, -0.05], [-0.03, 0.04, 0.11]])
    z = segment_margin(gap, torch.ones(2, 3), 40.0)
    assert_close(z, implicit_margin(gap.mean(1), 40.0))


def test_linear_weights_by_hand_and_clipped_on_both_sides():
    """.2 * 10 * gap + .5."""
    gap = tensor([-0.09, 0.05, -0.3, 0.3])
    assert_close(linear_weight(gap, 10.0, 0.05), tensor([0.32, 0.6, 0.05, 0.95]))


def test_linear_dpo_by_hand_and_its_weight_has_no_gradient():
    policy = POLICY.clone().requires_grad_()
    loss = linear_dpo(policy, REFERENCE, 10.0, 0.0)
    assert_close(loss, tensor([0.32 * -0.2, 0.6 * 0.21]))
    assert_close(gradient(loss, policy), tensor([0.32, 0.6, -0.32, -0.6]))


def test_the_scale_of_losers_by_hand():
    """|g_A|^2 = 5; products 10, 2.5, 1, -3: .4 * 5 / 10, .4 * 5 / 2.5, and no conflict twice."""
    winner = tensor([[1.0, 2.0]]).expand(4, 2)
    loser = tensor([[2.0, 4.0], [0.5, 1.0], [-1.0, 1.0], [1.0, -2.0]])
    assert_close(loser_scale(winner, loser, 0.6), tensor([0.2, 0.8, 1.0, 1.0]))


def test_the_scale_of_losers_at_zero_residuals_is_finite():
    zero, some = torch.zeros(1, 3), torch.ones(1, 3)
    assert loser_scale(zero, some, 0.5).item() == 1
    assert loser_scale(some, zero, 0.5).item() == 1
    assert loser_scale(some, some, 1.0).item() == 0


@given(st.integers(0, 999), st.floats(0.0, 1.0), st.floats(-1.0, 1.0), st.floats(0.1, 10.0))
def test_a_guarded_step_keeps_mu_of_the_winner_s_descent(seed, mu, mix, size):
    """(-g_A + scale g_B) . g_A <= -mu |g_A|^2 for losers between aligned and opposed."""
    generator = torch.Generator().manual_seed(seed)
    a, other = torch.randn(2, 5, 3, 2, generator=generator, dtype=torch.float64)
    b = size * (mix * a + (1 - abs(mix)) * other)
    scale = loser_scale(a, b, mu)
    step = -a + scale[:, None, None] * b
    descent, bound = (step * a).flatten(1).sum(1), -mu * a.square().flatten(1).sum(1)
    assert (descent <= bound + 1e-9).all()


@pytest.mark.parametrize("case", ["lam0", "lam1", "lam2"])
def test_the_scale_is_the_recorded_one_when_a_batch_is_taken_for_one_pair(case):
    recorded = load("F_sdpo")
    winner, loser = (recorded[f"{case}.pred"] - recorded[f"{case}.target"]).chunk(2)
    ours = [loser_scale(winner[None], loser[None], mu) for mu in (0.0, 0.2, 0.6, 0.9, 1.0)]
    assert_close(torch.cat(ours), recorded[f"{case}.lambda"], rtol=1e-4, atol=1e-6)


def test_mapo_by_hand():
    """f(.4) and f(1) with s = .5: .2 / (e^.2 - 1), .5 / (e^.5 - 1)."""
    near, far = 0.2 / (exp(0.2) - 1), 0.5 / (exp(0.5) - 1)
    policy = tensor([0.4, 1.0])
    assert_close(mapo_likelihood(policy, 0.5), tensor([near, far]))
    wanted = 0.4 + 0.1 * log(1 + exp(-30 * (near - far)))
    assert_close(mapo(policy, beta=0.1, scale=30.0, s=0.5), tensor([wanted]))


def test_likelihood_falls_from_one_and_is_finite_at_both_ends():
    error = tensor([0.0, 1e-3, 1.0, 1e4], requires_grad=True)
    likelihood = mapo_likelihood(error, 0.5)
    assert likelihood[0].item() == 1
    assert (likelihood.diff() < 0).all()
    assert gradient(likelihood, error).isfinite().all()


def test_the_margin_of_mapo_saturates_as_its_docstring_says():
    """At the published scale and errors .5 and .6 only fine-tuning of the winner is left."""
    policy = tensor([0.5, 0.6], dtype=torch.float64, requires_grad=True)
    down = gradient(mapo(policy, 0.1, 1000.0, 0.5), policy)[1]
    assert down.item() == pytest.approx(-3e-9, rel=0.05)
    near = tensor([0.5, 0.52], dtype=torch.float64)
    assert (-mapo_margin(near, 1000.0, 0.5)).sigmoid().item() == pytest.approx(0.01, rel=0.05)


def test_kto_by_hand():
    """beta (gain - baseline) = .8, -.6, 1.4, the last two with their label."""
    gain, liked = tensor([0.06, -0.01, 0.09]), tensor([True, True, False])
    x = (0.8, -0.6, -1.4)
    value = {
        "sigmoid": [1 / (1 + exp(-v)) for v in x],
        "loss_averse": [-log(1 + exp(-v)) for v in x],
        "risk_seeking": [log(1 + exp(v)) for v in x],
    }
    for utility, worth in value.items():
        loss = kto(gain, liked, tensor(0.02), 20.0, utility)
        assert_close(loss, 1 - tensor(worth))


def test_the_baseline_is_the_mean_gain_not_below_zero_and_without_gradient():
    gain = tensor([0.06, -0.01, 0.09], requires_grad=True)
    assert_close(kto_baseline(gain), tensor(0.14 / 3))
    assert not kto_baseline(gain).requires_grad
    assert kto_baseline(-gain).item() == 0


def test_exponential_weights_by_hand_are_capped_and_do_not_hide_the_unknown():
    weight = exponential_weight(tensor([0.5, -1.0, 400.0, nan]), 0.5, 20.0)
    assert_close(weight, tensor([math.e, exp(-2), 20.0, nan]), equal_nan=True)


# Recorded, from the recorded errors on ------------------------------------------------------------


@pytest.mark.parametrize(
    ("item", "beta"),
    [
        ("F_diffusion_dpo", 500),
        ("F_diffusion_dpo", 5000),
        ("F_flow_dpo", 100),
        ("F_flow_dpo", 2000),
    ],
)
def test_margin_and_loss_of_dpo_are_the_recorded_ones(item, beta):
    recorded = load(item, f"beta{beta}.")
    z = implicit_margin(relative_gap(recorded["losses"], recorded["ref_losses"]), float(beta))
    assert_close(z, recorded["inside"], rtol=2e-4, atol=0)
    assert_close(sigmoid_link(z).mean(), recorded["loss"], rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("case", "utility", "beta", "liked", "disliked"),
    [
        ("sigmoid", "sigmoid", 1000.0, 1.0, 1.0),
        ("sigmoid_w", "sigmoid", 300.0, 1.33, 0.7),
        ("loss_averse", "loss_averse", 1000.0, 1.0, 1.0),
        ("risk_seeking_3", "risk_seeking", 1000.0, 1.0, 1.0),
    ],
)
def test_gain_and_loss_of_kto_are_the_recorded_ones(case, utility, beta, liked, disliked):
    recorded = load("F_kto", f"{case}.")
    gain, label = recorded["ref_losses"] - recorded["losses"], recorded["labels"] == 1
    baseline = kto_baseline(gain)
    assert_close(baseline, recorded["kl"])
    assert_close(gain - baseline, recorded["g_minus_kl"], rtol=2e-4, atol=0)
    loss = kto(gain, label, baseline, beta, utility) * torch.where(label, liked, disliked)
    assert_close(loss.mean(), recorded["loss"], rtol=1e-5, atol=0)


@pytest.mark.parametrize("scale", [50, 1000])
@pytest.mark.parametrize("case", ["close", "wide", "misranked"])
def test_loss_of_mapo_is_the_recorded_one(case, scale):
    recorded = load("F_mapo", f"{case}.T{scale}.")
    policy = torch.cat([recorded[f"{case}.losses_w"], recorded[f"{case}.losses_l"]])
    loss = mapo(policy, 0.1, float(scale), 0.5)
    assert_close(loss.mean(), recorded["loss"], rtol=1e-5, atol=0)


def test_a_loser_is_scaled_down_to_the_length_of_the_winner_and_never_up():
    winner = tensor([[3.0, 4.0], [0.6, 0.8], [0.0, 0.0], [1.0, 0.0]])
    loser = tensor([[0.0, 10.0], [0.3, 0.4], [2.0, 0.0], [0.0, 0.0]])
    assert balancing_scale(winner, loser).tolist() == [0.5, 1.0, 0.0, 1.0]


def test_what_flows_back_is_scaled_and_the_value_is_not():
    x = tensor([[2.0], [3.0]], requires_grad=True)
    y = scale_row_gradients(x, tensor([0.5, 2.0]))
    assert torch.equal(y, x)
    y.square().sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[2.0], [12.0]]


# Preferences between transitions against arithmetic by hand ---------------------------------------


def test_step_dpo_by_hand():
    """-log s(2 (.3 + .2)) = log(1 + 1/e), and -log s(2 (-.1 - .4)) = log(1 + e)."""
    winner = torch.tensor([0.3, -0.1, 0.7], requires_grad=True)
    loser = torch.tensor([-0.2, 0.4, 0.7], requires_grad=True)
    loss = step_dpo(winner, loser, beta=2.0)
    wanted = [math.log(1 + math.exp(-1)), math.log(1 + math.e), math.log(2)]
    assert_close(loss, torch.tensor(wanted))
    up, down = torch.autograd.grad(loss.sum(), (winner, loser))
    # -beta sigmoid(-margin): the wrongly ordered pair pulls most.
    slope = torch.tensor([-2 / (1 + math.e), -2 / (1 + math.exp(-1)), -1.0])
    assert_close(up, slope)
    assert_close(down, -slope)


@pytest.mark.parametrize("far", [-1e4, 1e4])
def test_step_dpo_is_finite_however_far_apart_the_two_are(far):
    winner = torch.tensor([far], requires_grad=True)
    loss = step_dpo(winner, torch.zeros(1), beta=10.0)
    assert loss.isfinite()
    assert torch.autograd.grad(loss, winner)[0].isfinite()


def test_the_best_and_the_worst_of_each_group_by_hand():
    value = torch.tensor([3.0, -1.0, 5.0, 2.0, 4.0, 7.0, 7.0, -2.0])
    group = torch.tensor([9, 4, 9, 4, 9, 1, 1, 6])  # 1 is all equal, 6 has one member
    best, worst = best_and_worst(value, group)
    assert dict(zip(best.tolist(), worst.tolist(), strict=True)) == {3: 1, 2: 0}


def test_of_equal_extremes_one_is_taken():
    best, worst = best_and_worst(torch.tensor([1.0, 2.0, 1.0, 2.0, 1.5]), torch.zeros(5).long())
    assert (len(best), len(worst)) == (1, 1)
    assert best.item() in (1, 3)
    assert worst.item() in (0, 2)


def test_of_nothing_there_are_no_pairs():
    best, worst = best_and_worst(torch.zeros(0), torch.zeros(0).long())
    assert (len(best), len(worst)) == (0, 0)
