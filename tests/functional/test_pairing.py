"""Which media are compared: worked by hand, as recorded from Curriculum-DPO, and as properties."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowalign.functional.pairing import (
    check_margin,
    estimate_unsampled,
    pair_dominating,
    pair_extremes,
    pair_over_gap,
    select_widest,
    shorten_extremes,
    stages_by_rank,
    stages_by_score,
)
from tests.fixtures.golden import GOLDEN, load

NAN = float("nan")


def pairs(found) -> list[tuple[int, int]]:
    return list(zip(*(side.tolist() for side in found), strict=True))


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_the_extremes_are_those_of_what_is_known():
    assert pairs(pair_extremes(tensor(0.25, NAN, -1.5, 3.0, 2.0))) == [(3, 2)]
    assert pairs(pair_extremes(tensor(0.25, float("inf"), -1.5))) == [(0, 2)]


def test_the_first_of_equal_extremes_stands_for_them():
    assert pairs(pair_extremes(tensor(1.0, 4.0, 0.5, 4.0, 0.5))) == [(1, 2)]


@pytest.mark.parametrize("scores", [(), (NAN, NAN), (2.0,), (2.0, NAN), (2.0, 2.0, 2.0)])
def test_no_pair_without_two_different_scores(scores):
    assert pairs(pair_extremes(tensor(*scores))) == []
    assert pairs(pair_over_gap(tensor(*scores))) == []


def test_a_gap_counts_from_its_minimum_on():
    total = tensor(0.5, 2.0, 1.25)
    assert pairs(pair_extremes(total, min_gap=1.5)) == [(1, 0)]
    assert pairs(pair_extremes(total, min_gap=1.501)) == []
    assert pairs(pair_over_gap(total)) == [(1, 0), (2, 0), (1, 2)]
    assert pairs(pair_over_gap(total, 0.75)) == [(1, 0), (2, 0), (1, 2)]
    assert pairs(pair_over_gap(total, 0.751)) == [(1, 0)]


def test_all_pairs_come_in_the_order_of_their_positions():
    found = pair_over_gap(tensor(3.0, 1.0, NAN, 3.0, 2.0))
    assert pairs(found) == [(0, 1), (0, 4), (3, 1), (4, 1), (3, 4)]


def test_a_dominating_medium_is_worse_in_no_dimension():
    scores = tensor([1.0, 5.0], [2.0, 5.0], [3.0, 4.75], [0.5, NAN])
    total = scores.nansum(1)
    assert pairs(pair_dominating(scores, total)) == [(1, 0)]
    assert pairs(pair_dominating(scores, total, tolerance=0.25)) == [(1, 0), (2, 0), (2, 1)]
    assert pairs(pair_dominating(scores, total, tolerance=0.25, min_gap=1.0)) == [(1, 0), (2, 0)]


def test_dominance_needs_a_strictly_higher_total():
    scores = tensor([1.0, 2.0], [1.0, 2.0])
    assert pairs(pair_dominating(scores, scores.sum(1), tolerance=1.0)) == []


def test_the_widest_gaps_stay_in_their_order():
    assert select_widest(tensor(0.5, 2.0, 0.25, 2.0, 1.0), 3).tolist() == [1, 3, 4]
    assert select_widest(tensor(0.5, 2.0, 2.0), 1).tolist() == [1]
    assert select_widest(tensor(0.5), 4).tolist() == [0]


def recorded_pairs(smallest: float) -> tuple[list[tuple[int, int]], torch.Tensor]:
    """All pairs of the recording's prompts with a difference above the smallest gap."""
    scores = load("F_curriculum")["scores"]
    places, gaps = [], []
    for start in range(0, len(scores), 5):
        of_prompt = scores[start : start + 5]
        for winner, loser in pairs(pair_over_gap(of_prompt, smallest)):
            places.append((start + min(winner, loser), start + max(winner, loser)))
            gaps.append(of_prompt[winner] - of_prompt[loser])
    return places, torch.stack(gaps)


@pytest.mark.parametrize("groups", [3, 5])
@pytest.mark.parametrize(("kind", "smallest"), [("aesthetic", 0.2), ("human", 0.02)])
def test_stages_by_score_release_the_pairs_that_the_reference_does(kind, smallest, groups):
    recording = json.loads((GOLDEN / "F_curriculum.json").read_text())["values"]["stages"]
    released = recording[f"{kind}_score_groups{groups}"]["pairs_per_stage"]
    places, gap = recorded_pairs(smallest)
    stage = stages_by_score(gap, groups - 1)
    assert stage.max() == groups - 2
    for k in range(groups - 1):
        mine = {
            place: float(size)
            for place, size, of in zip(places, gap, stage.tolist(), strict=True)
            if of <= k
        }
        assert mine == {(i, j): size for i, j, size in released[k]}


def test_stages_by_score_divide_the_range_of_gaps_into_equal_parts():
    gap = tensor(0.5, 4.5, 2.5, 2.49, 3.5, 1.6)
    assert stages_by_score(gap, 2).tolist() == [1, 0, 0, 1, 0, 1]
    assert stages_by_score(gap, 4).tolist() == [3, 0, 1, 2, 0, 2]
    assert stages_by_score(gap, 1).tolist() == [0] * 6


def test_stages_by_rank_bring_equally_many_pairs():
    gap = tensor(0.5, 9.0, 0.25, 0.3, 8.0)
    assert stages_by_rank(gap, 2).tolist() == [0, 0, 1, 1, 0]
    assert stages_by_rank(gap, 5).tolist() == [2, 0, 4, 3, 1]


@pytest.mark.parametrize("divide", [stages_by_score, stages_by_rank])
def test_no_pairs_have_no_stages(divide):
    assert divide(tensor(), 3).tolist() == []


SCORES = st.lists(st.sampled_from([NAN, -1.0, 0.0, 0.5, 2.0]), min_size=0, max_size=6)


@given(SCORES, st.sampled_from([0.0, 0.5, 1.0]))
def test_every_two_far_enough_apart_are_a_pair_once_and_the_right_way_round(scores, gap):
    expected = {
        (i, j) for i, a in enumerate(scores) for j, b in enumerate(scores) if a > b and a - b >= gap
    }
    found = pairs(pair_over_gap(tensor(*scores), gap))
    assert len(found) == len(expected)
    assert set(found) == expected


@given(SCORES)
def test_dominance_over_one_dimension_is_the_gap_rule(scores):
    column = tensor(*scores)[:, None]
    assert pairs(pair_dominating(column, column[:, 0])) == pairs(pair_over_gap(column[:, 0]))


@given(st.lists(st.floats(0.1, 9.0), min_size=1, max_size=9), st.integers(1, 5))
def test_wider_gaps_never_come_later(gaps, count):
    for divide in (stages_by_score, stages_by_rank):
        stage = divide(tensor(*gaps), count)
        assert stage.min() >= 0
        assert stage.max() < count
        order = tensor(*gaps).argsort(descending=True, stable=True)
        assert (stage[order].diff() >= 0).all()


def test_extremes_pair_the_second_best_with_the_second_worst_and_leave_out_equals_and_failures():
    total = torch.tensor([0.3, float("nan"), 0.9, 0.1, 0.3, 0.7, 0.2])
    assert [side.tolist() for side in pair_extremes(total, 3)] == [[2, 5], [3, 6]]
    assert [side.tolist() for side in pair_extremes(total, 1)] == [[2], [3]]
    assert [len(side) for side in pair_extremes(total[:2], 3)] == [0, 0]


def test_of_several_extremes_only_those_far_enough_apart_stay():
    total = tensor(0.5, 4.0, 1.0, 3.0, 2.25, 2.0)
    assert pairs(pair_extremes(total, 3, 1.5)) == [(1, 0), (3, 2)]
    assert pairs(pair_extremes(total, 3, 2.0)) == [(1, 0), (3, 2)]
    assert pairs(pair_extremes(total, 3, 2.001)) == [(1, 0)]


@pytest.mark.parametrize("value", [-0.5, NAN, float("inf")])
def test_a_margin_that_no_pair_can_have_is_refused_by_name(value):
    with pytest.raises(ValueError, match=rf"rule\.min_gap is {value:g}; it must be at least 0"):
        check_margin("rule.min_gap", value)
    check_margin("rule.min_gap", 0.0)


# Extremes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("agreement", [1.0, 0.93, 0.7])
def test_shortened_extremes_give_the_mean_gradient_of_the_group_in_a_linear_world(agreement):
    """The gradient's mean is the covariance of reward and score, here 0.2."""
    torch.manual_seed(0)
    num, size, count = 4000, 96, 12
    reward = torch.randn(num, size, dtype=torch.float64)
    score = 0.2 * reward + 0.96**0.5 * torch.randn_like(reward)
    noise = (1 / agreement**2 - 1) ** 0.5
    preview = 0.5 * (reward + noise * torch.randn_like(reward)) - 3
    order = preview.argsort(1)
    chosen = torch.cat([order[:, :count], order[:, -count:]], 1)
    values = estimate_unsampled(preview[..., None], reward.gather(1, chosen)[..., None], chosen)[
        ..., 0
    ]
    advantage = (values - values.mean(1, keepdim=True)) / values.std(1, keepdim=True, correction=0)
    mask = torch.zeros_like(reward, dtype=torch.bool).scatter(1, chosen, True)
    group = torch.arange(num)[:, None].expand_as(mask).reshape(-1, 1)
    flat = advantage.reshape(-1, 1), group, torch.ones_like(group, dtype=torch.bool)
    short = shorten_extremes(*flat, mask.reshape(-1, 1)).view(num, size)
    assert values.mean() == pytest.approx(0, abs=0.01)
    assert values.std(1).mean() == pytest.approx(1, abs=0.03)
    assert (short * score)[mask].mean() == pytest.approx(0.2, rel=0.05)
    if agreement == 1:
        kept = reward.gather(1, chosen)
        own = (kept - kept.mean(1, keepdim=True)) / kept.std(1, keepdim=True)
        assert (own * score.gather(1, chosen)).mean() == pytest.approx(0.2 * 1.68, rel=0.05)
        assert (advantage * score)[mask].mean() == pytest.approx(0.2 * 2.82, rel=0.05)


def test_estimates_follow_the_line_of_the_chosen_and_their_residuals_in_turn():
    preview = tensor(0.0, 1.0, 2.0, 3.0, 4.0)[None, :, None]
    chosen = torch.tensor([[0, 1, 4]])
    # Final minus preview is 1, 1 and 1: a shift.
    shifted = estimate_unsampled(preview, tensor(1.0, 2.0, 5.0)[None, :, None], chosen)
    assert shifted.flatten().tolist() == [1, 2, 3, 4, 5]
    # The gaps 0, 1 and 4 equal the previews, so finals are twice the previews.
    doubled = estimate_unsampled(preview, tensor(0.0, 2.0, 8.0)[None, :, None], chosen)
    assert doubled.flatten().tolist() == pytest.approx([0, 2, 4, 6, 8])
    # A failed reward stays unknown, and the fit is that of the others.
    failed = estimate_unsampled(preview, tensor(1.0, NAN, 5.0)[None, :, None], chosen)
    assert failed.flatten().tolist() == pytest.approx([1, NAN, 3, 4, 5], nan_ok=True)
    same = torch.randn(2, 5, 3)
    chosen = torch.tensor([[0, 3], [4, 1]])
    assert torch.equal(
        estimate_unsampled(same, same.gather(1, chosen[..., None].expand(-1, -1, 3)), chosen), same
    )
