"""Losses of reward models: by hand, torch.distributions, numbers recorded from two repositories."""

import math
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from flowalign.functional import reward_loss as loss
from tests.fixtures.golden import load

LN3 = math.log(3)


def t(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)


# By hand ------------------------------------------------------------------------------------------


def test_bradley_terry_by_hand():
    """sigmoid(ln 3) = 3/4: won, lost, tied, and with three quarters of the votes."""
    a, b = t(LN3, LN3, LN3, LN3), torch.zeros(4)
    got = loss.bradley_terry(a, b, t(1, 0, 0.5, 0.75))
    won, lost = -math.log(3 / 4), -math.log(1 / 4)
    assert_close(got, t(won, lost, (won + lost) / 2, 0.75 * won + 0.25 * lost))


def test_margins_by_hand():
    """Winner leads by ln 3 + 0.5 with margin 0.5: 3/4. Loser is behind by ln 3 - 0.5: 1/4."""
    a, b = t(LN3 + 0.5, LN3 - 0.5), torch.zeros(2)
    assert_close(loss.margin(a, b, t(1, 0), 0.5), t(-math.log(3 / 4), -math.log(1 / 4)))


def test_equal_scores_tie_with_two_thirds_at_k_five():
    """P(A) = sigmoid(-ln 5) = 1/6 twice, and (25 - 1) / 36 between them."""
    zero, log_k = torch.zeros(3), t(math.log(5))
    got = loss.bt_with_ties(zero, zero, t(1, 0.5, 0), log_k)
    assert_close(got, -t(1 / 6, 2 / 3, 1 / 6).log())
    assert math.exp(loss.log_k_of(2 / 3)) == pytest.approx(5)


def test_bt_with_ties_picks_what_people_said():
    """d = ln 3, k = 5: P(A) = 3/8, P(B) = 1/16, and 9/16 is left for the tie."""
    a, b = torch.full((3,), LN3), torch.zeros(3)
    got = loss.bt_with_ties(a, b, t(1, 0.5, 0), t(math.log(5)))
    assert_close(got, -t(3 / 8, 9 / 16, 1 / 16).log())


def test_thurstone_is_the_normal_distribution():
    a, b = t(1, -2, 0.3), t(0.5, 1, 0.3)
    log_a, log_b, target = t(0.2, -1, 0), t(-0.4, 0.7, 1), t(1, 0.25, 0)
    variance = (2 * log_a).exp() + (2 * log_b).exp()
    p = torch.distributions.Normal(0.0, variance.sqrt()).cdf(a - b)
    wanted = -(target * p.log() + (1 - target) * (1 - p).log())
    assert_close(loss.thurstone(a, b, target, log_a, log_b), wanted)


def test_the_uncertain_loss_is_what_a_million_draws_say():
    a, b, target = t(1.5, -0.5, 0.2), t(0, 0.4, -0.3), t(1, 0, 0.3)
    log_a, log_b = t(0.1, 0.5, -2), t(-0.3, 1, -3)
    variance = (2 * log_a).exp() + (2 * log_b).exp()
    draws = torch.randn(1_000_000, 3, generator=torch.Generator().manual_seed(0))
    z = (a - b) + variance.sqrt() * draws
    each = loss.bradley_terry(z, torch.zeros_like(z), target.expand_as(z))
    error = each.std(0) / 1000
    got = loss.uncertainty(a, b, target, log_a, log_b)
    assert ((got - each.mean(0)).abs() < 4 * error + 1e-6).all()
    assert (error[:2] < 2e-3).all()


def test_the_nodes_integrate_polynomials_exactly():
    """E x^2k = (2k - 1)!!, and odd powers vanish."""
    nodes, weights = (torch.tensor(v, dtype=torch.float64) for v in loss._gauss_hermite(32))
    for power, wanted in ((0, 1), (1, 0), (2, 1), (4, 3), (7, 0), (8, 105), (12, 10395)):
        assert_close((weights * nodes**power).sum(), t(wanted, dtype=torch.float64)[0])


def test_without_uncertainty_it_is_bradley_terry():
    a, b, target, log_sigma = t(0.3, -1, 2), t(0, 0.5, 2), t(1, 0.4, 0), torch.full((3,), -12.0)
    got = loss.uncertainty(a, b, target, log_sigma, log_sigma)
    assert_close(got, loss.bradley_terry(a, b, target))


def test_votes_by_hand():
    """softmax(ln 3, 0) = 3/4, 1/4: all votes for the first, agreement, and a tie of two."""
    score = t(LN3, 0).expand(2, 2)
    every = torch.ones(2, 2, dtype=torch.bool)
    got = loss.vote_fraction(score, torch.tensor([[1, 0], [0.75, 0.25]]), every)
    assert_close(got, t(-math.log(3 / 4), 0))
    tie = loss.vote_fraction(t(7, 7)[None], t(0.5, 0.5)[None], every[:1])
    assert_close(tie, torch.zeros(1), atol=1e-6, rtol=0)


def test_votes_on_a_shorter_list_do_not_see_the_padding():
    score, share = t(0.4, -1, 2, 99)[None], t(0.2, 0.5, 0.3, 7)[None]
    mask = torch.tensor([[True, True, True, False]])
    got = loss.vote_fraction(score.requires_grad_(), share, mask)
    assert_close(got, loss.vote_fraction(score[:, :3], share[:, :3], mask[:, :3]))
    assert torch.autograd.grad(got.sum(), score)[0][0, 3] == 0


def test_plackett_luce_by_hand():
    """Scores ln 1, ln 2, ln 3 ranked 3, 1, 2: 2/6 first, then 3/4."""
    score = t(1, 2, 3).log()[None]
    mask = torch.ones(1, 3, dtype=torch.bool)
    assert_close(loss.plackett_luce(score, t(3, 1, 2)[None], mask), -t(2 / 6 * 3 / 4).log())


def test_the_probabilities_of_all_rankings_sum_to_one():
    score = t(0.3, -1.2, 2.0, 0.9).expand(24, 4)
    ranks = torch.cartesian_prod(*[torch.arange(1.0, 5)] * 4)
    ranks = ranks[[len(set(r.tolist())) == 4 for r in ranks]]
    every = torch.ones(24, 4, dtype=torch.bool)
    assert_close(loss.plackett_luce(score, ranks, every).neg().exp().sum(), t(1)[0])


def test_equal_ranks_are_not_compared_with_each_other():
    """Scores ln 1, ln 2, ln 4, ranked 1, 1, 2: each of the first two against the last alone."""
    score = t(1, 2, 4).log()[None].requires_grad_()
    mask = torch.ones(1, 3, dtype=torch.bool)
    got = loss.plackett_luce(score, t(1, 1, 2)[None], mask)
    assert_close(got, -t(1 / 5 * 2 / 6).log())
    tied = loss.plackett_luce(score, t(1, 1, 1)[None], mask)
    assert_close(tied, torch.zeros(1))
    assert_close(torch.autograd.grad(tied.sum(), score)[0], torch.zeros(1, 3))


def test_a_ranked_pair_is_bradley_terry_and_padding_changes_nothing():
    score = torch.tensor([[0.7, -0.4, 5.0], [1.0, 3.0, 4.0]])
    mask = torch.tensor([[True, True, False]] * 2)
    rank = torch.tensor([[1.0, 2.0, 1.0], [1.0, 2.0, 3.0]])
    got = loss.plackett_luce(score, rank, mask)
    assert_close(got, loss.bradley_terry(score[:, 0], score[:, 1], torch.ones(2)))


def test_lists_that_teach_hold_two_different_ranks():
    rank = torch.tensor([[1.0, 1, 2], [2, 2, 2], [1, 1, 3], [4, 5, 6]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0], [0, 0, 0]]).bool()
    assert loss.has_order(rank, mask).tolist() == [True, False, False, False]


def test_ratings_by_hand():
    assert_close(loss.squared_error(t(1, -1), t(3, -1.5)), t(4, 0.25))
    assert_close(loss.huber(t(1, -1), t(3, -1.5)), t(1.5, 0.125))


def test_levels_by_hand():
    """Cuts -ln 3, ln 3 at score 0: 1/4, 1/2, 1/4."""
    got = loss.ordinal(torch.zeros(3), torch.tensor([0, 1, 2]), t(-LN3, LN3))
    assert_close(got, -t(1 / 4, 1 / 2, 1 / 4).log())


def test_the_probabilities_of_all_levels_sum_to_one_for_cuts_of_each_dimension():
    cuts = torch.tensor([[-1.0, 0.0, 0.2, 2.0], [-3.0, -2.9, 1.0, 1.5]])
    score = torch.tensor([[0.3, -4.0], [1.7, 0.0], [-30.0, 25.0]])
    levels = [loss.ordinal(score, torch.full((3, 2), level), cuts) for level in range(5)]
    assert_close(torch.stack(levels).neg().exp().sum(0), torch.ones(3, 2))


# Masks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("far", [-1e4, 1e4])
@pytest.mark.parametrize("target", [0.0, 0.5, 1.0])
def test_losses_and_gradients_are_finite_however_far_apart_the_scores_are(far, target):
    a, zero, p = t(far).requires_grad_(), torch.zeros(1), t(target)
    both = torch.ones(1, 2, dtype=torch.bool)
    every = [
        loss.bradley_terry(a, zero, p),
        loss.margin(a, zero, p),
        loss.bt_with_ties(a, zero, p, t(math.log(5))),
        loss.thurstone(a, zero, p, zero, zero),
        loss.uncertainty(a, zero, p, zero, zero),
        loss.ordinal(a, torch.tensor([int(2 * target)]), t(-1, 1)),
        loss.vote_fraction(torch.stack([a, zero], -1), torch.stack([p, 1 - p], -1), both),
    ]
    for each in every:
        assert each.isfinite().all()
        assert torch.autograd.grad(each.sum(), a)[0].isfinite().all()


@pytest.mark.parametrize(
    ("each", "message"),
    [
        (partial(loss.bt_with_ties, t(1), t(0), t(0.7), t(1)), "0, 0.5 \\(a tie\\) or 1"),
        (partial(loss.bt_with_ties, t(1), t(0), t(1), t(0)), "log_k must be above 0.*0.0"),
        (partial(loss.ordinal, t(1), torch.tensor([0]), t(1, 1)), "cuts must increase"),
        (partial(loss.ordinal, t(1), torch.tensor([3]), t(1, 2)), "levels must be 0 to 2, got 3"),
        (partial(loss.log_k_of, 1.0), "inside \\(0, 1\\), got 1.0"),
    ],
)
def test_what_has_no_probability_is_refused(each, message):
    with pytest.raises(ValueError, match=message):
        each()


# Properties ---------------------------------------------------------------------------------------


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_swapping_a_and_b_changes_nothing():
    a, b, s, r = random(4, 7, 3)
    p = random(7, 3, seed=1).sigmoid()
    hard = (p * 3).floor() / 2
    k = t(0.2, 1, 3, dtype=torch.float64)
    for f, target, first, second in (
        (loss.bradley_terry, p, (), ()),
        (loss.margin, p, (), ()),
        (loss.bt_with_ties, hard, (k,), (k,)),
        (loss.thurstone, p, (s, r), (r, s)),
        (loss.uncertainty, p, (s, r), (r, s)),
    ):
        assert_close(f(a, b, target, *first), f(b, a, 1 - target, *second))


def test_outcomes_with_ties_sum_to_one():
    a, b = random(2, 50, 3) * 20
    k = t(1e-6, 1, 30, dtype=torch.float64)
    ones = torch.ones_like(a)
    outcomes = [loss.bt_with_ties(a, b, p * ones, k).neg().exp() for p in (1, 0.5, 0)]
    total = torch.stack(outcomes).sum(0)
    assert_close(total, torch.ones(50, 3, dtype=torch.float64), atol=1e-14, rtol=0)


def test_the_learned_k_finds_the_share_of_ties():
    """Of equal scores 30 % tie: the optimum is k with (k - 1) / (k + 1) = 0.3."""
    log_k, zero = t(2.0, dtype=torch.float64).requires_grad_(), torch.zeros(10).double()
    target = t(*[0.5] * 3, *[1] * 4, *[0] * 3, dtype=torch.float64)
    for _ in range(200):
        slope = torch.autograd.grad(loss.bt_with_ties(zero, zero, target, log_k).mean(), log_k)[0]
        log_k = (log_k - slope).detach().requires_grad_()
    assert log_k.item() == pytest.approx(loss.log_k_of(0.3), abs=1e-6)


def test_gradients_are_those_of_finite_differences():
    a, b, s, r = (x.requires_grad_() for x in random(4, 5, 2))
    p = random(5, 2, seed=1).sigmoid()
    hard = (p * 3).floor() / 2
    rank = t(1, 2, 2, 3, 5, dtype=torch.float64).expand(2, 5)
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 1, 1]]).bool()
    cuts = torch.tensor([[-1.0, 0.5], [0.0, 2.0]], dtype=torch.float64, requires_grad=True)
    log_k = t(0.7, 1.9, dtype=torch.float64).requires_grad_()
    for f, inputs in (
        (lambda a, b: loss.bradley_terry(a, b, p), (a, b)),
        (lambda a, b: loss.margin(a, b, p), (a, b)),
        (lambda a, b, k: loss.bt_with_ties(a, b, hard, k), (a, b, log_k)),
        (lambda a, b, s, r: loss.thurstone(a, b, p, s, r), (a, b, s, r)),
        (lambda a, b, s, r: loss.uncertainty(a, b, p, s, r), (a, b, s, r)),
        (lambda a: loss.vote_fraction(a.T, p.T.softmax(-1), mask), (a,)),
        (lambda a: loss.plackett_luce(a.T, rank, mask), (a,)),
        (lambda a, c: loss.ordinal(a, (hard * 2).long(), c), (a, cuts)),
    ):
        assert torch.autograd.gradcheck(f, inputs)


# Recorded -----------------------------------------------------------------------------------------


@pytest.fixture
def align():
    g = load("H_videoalign_losses")
    labels = g["labels"]
    return g | {
        "target": torch.where(labels.abs() == 1, (labels + 1) / 2, 0.5),
        "decided": labels.abs() == 1,
        "labelled": labels != 22,
    }


def against(g, name, each, mask, a, b):
    """The recorded mean is over all entries; entries outside the mask count 0."""
    mean = torch.where(mask, each, 0.0).mean()
    assert_close(mean, g[f"{name}.loss"], rtol=1e-5, atol=0)
    ours = torch.autograd.grad(mean, (a, b))
    assert_close(ours, (g[f"{name}.grad_A"], g[f"{name}.grad_B"]), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["bt", "margin", "constant_margin", "btt"])
def test_pair_losses_are_those_of_videoalign(align, name):
    a, b = align["A"].requires_grad_(), align["B"].requires_grad_()
    p = align["target"]
    gap = (2 * p - 1) * (align["scores_A"] - align["scores_B"])  # negative if they contradict
    each = {
        "bt": lambda: loss.bradley_terry(a, b, p),
        "margin": lambda: loss.margin(a, b, p, gap),
        "constant_margin": lambda: loss.margin(a, b, p),
        "btt": lambda: loss.bt_with_ties(a, b, p, t(math.log(5))),
    }[name]()
    against(align, name, each, align["labelled" if name == "btt" else "decided"], a, b)


def test_regression_is_that_of_videoalign(align):
    """A rating of 0 means missing in VideoAlign; the mean is over both samples of every pair."""
    a, b = align["A"].requires_grad_(), align["B"].requires_grad_()
    scores = torch.stack([a, b])
    ratings = torch.stack([align["scores_A"], align["scores_B"]])
    against(align, "reg", loss.squared_error(scores, ratings - 3), ratings > 0, a, b)


@pytest.fixture
def hps():
    g = load("H_hpsv3_io", "loss.")
    a, b = g["A"].requires_grad_(), g["B"].requires_grad_()
    return g, a, b, torch.ones(6)


@pytest.mark.parametrize("name", ["bt", "constant_margin", "btt"])
def test_pair_losses_are_those_of_hpsv3(hps, name):
    g, a, b, p = hps
    f = {
        "bt": loss.bradley_terry,
        "constant_margin": loss.margin,
        "btt": partial(loss.bt_with_ties, log_k=t(math.log(5))),
    }[name]
    mean = f(a[:, 0], b[:, 0], p).mean()
    assert_close(mean, g[name], rtol=1e-5, atol=0)
    ours = torch.autograd.grad(mean, (a, b))
    assert_close(ours, (g[f"{name}.grad_A"], g[f"{name}.grad_B"]), rtol=1e-5, atol=1e-7)


def test_uncertainty_is_the_mean_of_what_hpsv3_draws(hps):
    """3,000 calls of its 1,000 half-precision draws have this mean; 3 standard errors and fp16."""
    _, a, b, p = hps
    got = loss.uncertainty(a[:, 0], b[:, 0], p, a[:, 1], b[:, 1]).mean()
    assert got.item() == pytest.approx(1.3175480361382166, abs=3 * 0.0160252 / 3000**0.5 + 1e-4)


def test_uncertainty_has_the_gradients_of_hpsv3_up_to_the_noise_of_its_draws(hps):
    g, a, b, p = hps
    mean = loss.uncertainty(a[:, 0], b[:, 0], p, a[:, 1], b[:, 1]).mean()
    ours = torch.autograd.grad(mean, (a, b))
    # The recorded call is one of 1,000 draws: its error is about 1/30 of a standard deviation.
    theirs = g["uncertainty.grad_A"], g["uncertainty.grad_B"]
    assert_close(ours, theirs, rtol=0, atol=0.02)


def test_hpsv3_with_a_tie_threshold_mixes_pairs_and_ours_does_not(hps):
    """Its mask [6] times its loss [6, 1] is [6, 6]: the mean over all is share of kept x mean."""
    g, a, b, p = hps
    votes = g["choice_dist"] / g["choice_dist"].sum(1, keepdim=True)
    kept = (votes[:, 0] - votes[:, 1]).abs() > 0.25
    each = loss.bradley_terry(a[:, 0], b[:, 0], p)
    assert_close(g["bt_ties"], kept.float().mean() * each.mean(), rtol=1e-5, atol=0)
    assert not math.isclose(each[kept].mean().item(), g["bt_ties"].item(), rel_tol=0.1)
