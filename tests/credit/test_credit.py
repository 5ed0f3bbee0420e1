"""Credit along a chain against arithmetic by hand, recordings and invariances."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from flowalign.credit.chain import gains, lambda_returns
from flowalign.credit.turning_point import (
    balance_turning_points,
    turning_point_credit,
    turning_points,
)
from flowalign.functional.advantage import advantages
from tests.fixtures.golden import load

quick = settings(max_examples=60, deadline=None, database=None)
NAN = float("nan")


def column(*values: float) -> Tensor:
    """The values of one trajectory, one reward dimension."""
    return torch.tensor(values)[None, :, None]


def turns(values: Tensor, *args, **kwargs) -> Tensor:
    return turning_points(values, *args, **kwargs) > 0


@st.composite
def some_values(draw, step: float = 0.25) -> Tensor:
    """B x S x R values on a grid, so that ties and standstills are frequent."""
    groups, size, states, dims = (draw(st.integers(1, n)) for n in (3, 4, 6, 2))
    seed = draw(st.integers(0, 10**6))
    whole = torch.randint(
        -3, 4, (groups * size, states + 1, dims), generator=torch.Generator().manual_seed(seed)
    )
    return step * whole


# Gains --------------------------------------------------------------------------------------------


def test_gains_by_hand():
    assert gains(column(1.0, 4.0, 2.0, 2.5)).flatten().tolist() == [3.0, -2.0, 0.5]


@quick
@given(values=some_values())
def test_gains_sum_to_what_the_trajectory_has_gained(values):
    assert torch.equal(gains(values).sum(1), values[:, -1] - values[:, 0])


def test_a_missing_value_spoils_the_two_gains_beside_it():
    got = gains(column(1.0, 4.0, NAN, 2.5, 3.0)).flatten()
    assert got.isnan().tolist() == [False, True, True, False]


# Turning points -----------------------------------------------------------------------------------


def test_a_step_that_reverses_a_loss_owns_what_is_gained_from_it_on():
    values = column(0.0, -1.0, 1.0, 4.0)
    assert turns(values).flatten().tolist() == [False, True, False]
    got = turning_point_credit(values, turning_points(values))
    assert got.flatten().tolist() == [-1.0, 5.0, 3.0]


def test_a_reversal_that_what_follows_takes_back_turns_only_without_constraint():
    values = column(0.0, -1.0, 5.0, 4.0)
    assert not turns(values).any()
    free = turning_points(values, "none")
    assert (free > 0).flatten().tolist() == [False, True, False]
    assert turning_point_credit(values, free).flatten().tolist() == [-1.0, 5.0, -1.0]


def test_a_step_that_goes_with_a_falling_trajectory_turns_it_too():
    values = column(0.0, 2.0, -1.0, -3.0)
    assert turns(values).flatten().tolist() == [False, True, False]
    got = turning_point_credit(values, turning_points(values))
    assert got.flatten().tolist() == [2.0, -5.0, -2.0]


@pytest.mark.parametrize(
    ("values", "constraint", "first"),
    [
        ((0.0, 1.0, 2.0, 3.0), "consistent", True),
        ((0.0, 3.0, 2.0, 1.0), "consistent", False),  # what follows goes the other way
        ((0.0, 3.0, 2.0, 1.0), "none", True),  # but the overall gain does not
        ((0.0, -1.0, 2.0, 1.0), "none", False),
    ],
)
def test_the_first_step_turns_without_a_step_before_it(values, constraint, first):
    assert bool(turns(column(*values), constraint)[0, 0]) is first
    assert not turns(column(*values), constraint, first_step=False)[0, 0]
    later = turns(column(*values), constraint, first_step=False)[:, 1:]
    assert torch.equal(turns(column(*values), constraint)[:, 1:], later)


def test_standstill_is_neither_with_nor_against_the_trend():
    assert not turns(column(0.0, 0.0, 1.0, 2.0)).any()
    assert not turns(column(0.0, -1.0, 1.0, 0.0)).any()  # no overall gain


@pytest.mark.parametrize(("dead_zone", "turned"), [(0.0, True), (0.99, True), (1.0, False)])
def test_changes_within_the_dead_zone_turn_nothing(dead_zone, turned):
    """The loss that is turned around has size 1."""
    values = column(0.0, -1.0, 2.0, 5.0)
    assert turns(values, dead_zone=dead_zone).flatten().tolist() == [False, turned, False]


@pytest.mark.parametrize(
    ("missing", "undecided"),
    [(0, {0, 1, 2, 3, 4}), (1, {0, 1, 2}), (2, {1, 2, 3}), (4, {3, 4}), (5, {0, 1, 2, 3, 4})],
)
def test_a_missing_value_leaves_undecided_what_depends_on_it(missing, undecided):
    """V_k is in gains k - 1 and k, and gain k is what step k + 1 may turn; the ends are in all."""
    values = column(0.0, -1.0, 1.0, 0.5, 2.0, 4.0)
    values[:, missing] = NAN
    turning = turning_points(values)
    earned = turning_point_credit(values, turning)
    assert set(turning.flatten().isnan().nonzero().flatten().tolist()) == undecided
    assert set(earned.flatten().isnan().nonzero().flatten().tolist()) == undecided
    assert torch.equal(balance_turning_points(turning, values, 1).isnan(), turning.isnan())


def test_without_the_first_steps_rule_it_does_not_need_the_outcome():
    values = column(0.0, -1.0, 1.0, NAN)
    turning = turning_points(values, first_step=False)
    assert turning_point_credit(values, turning).flatten().isnan().tolist() == [False, True, True]


@quick
@given(
    values=some_values(),
    factor=st.sampled_from([-4.0, -1.0, 0.5, 2.0]),
    constraint=st.sampled_from(["consistent", "none"]),
    dead_zone=st.sampled_from([0.0, 0.25, 0.5]),
)
def test_turning_points_know_neither_the_sign_nor_the_scale_of_a_reward(
    values, factor, constraint, dead_zone
):
    plain = turning_points(values, constraint, dead_zone=dead_zone)
    scaled = turning_points(factor * values, constraint, dead_zone=abs(factor) * dead_zone)
    assert torch.equal(plain, scaled)
    size = len(values)
    kept, kept_scaled = (
        balance_turning_points(plain, values, size),
        balance_turning_points(scaled, factor * values, size),
    )
    assert torch.equal(kept, kept_scaled)
    wanted = factor * turning_point_credit(values, kept)
    assert torch.equal(turning_point_credit(factor * values, kept_scaled), wanted)


@quick
@given(values=some_values(), wide=st.sampled_from([0.25, 0.5, 1.0, 100.0]))
def test_a_wider_dead_zone_leaves_fewer_turning_points(values, wide):
    for constraint in ("consistent", "none"):
        all_of_them = turns(values, constraint)
        fewer = turns(values, constraint, dead_zone=wide)
        assert not (fewer & ~all_of_them).any()
        assert wide < 100 or not fewer.any()


@quick
@given(values=some_values())
def test_the_constraint_only_removes_inner_turns_and_keeps_the_sign_of_gains(values):
    consistent, free = turns(values), turns(values, "none")
    assert not (consistent[:, 1:] & ~free[:, 1:]).any()
    assert not consistent[:, -1].any()  # nothing follows the last step
    gain, earned = gains(values), turning_point_credit(values, turning_points(values))
    assert torch.equal(earned[~consistent], gain[~consistent])
    assert (earned[consistent].sign() == gain[consistent].sign()).all()
    assert (earned[consistent].abs() > gain[consistent].abs()).all()


@quick
@given(values=some_values())
def test_reward_dimensions_turn_independently(values):
    size = len(values)
    whole = balance_turning_points(turning_points(values), values, size)
    for r in range(values.shape[-1]):
        alone = values[..., r : r + 1]
        assert torch.equal(
            balance_turning_points(turning_points(alone), alone, size), whole[..., r : r + 1]
        )


# Balance ------------------------------------------------------------------------------------------

FIVE = torch.tensor(
    [
        [0.0, -1.0, 1.0, 2.0, 1.5, 3.0],  # rises by 3, turns at 1
        [0.0, 1.0, -1.0, -1.5, -1.0, -2.0],  # falls by 2, turns at 1
        [0.0, 1.0, 2.0, 1.0, 4.0, 5.0],  # rises by 5, turns at 0 and 3
        [0.0, 1.0, -1.0, -1.5, -1.0, -2.0],  # falls by 2 as well, turns at 1
        [0.0, 1.0, 2.0, 2.0, 3.0, 3.5],  # rises by 3.5, turns at 0
    ]
)[..., None]


def where(turning: Tensor) -> list[tuple[int, int]]:
    return [(b, k) for b, k, _ in (turning > 0).nonzero().tolist()]


def test_balance_keeps_as_many_rising_as_falling_turning_points_by_hand():
    turning = turning_points(FIVE)
    assert where(turning) == [(0, 1), (1, 1), (2, 0), (2, 3), (3, 1), (4, 0)]
    assert where(balance_turning_points(turning, FIVE, 5)) == [(1, 1), (2, 0), (2, 3), (3, 1)]


def test_ties_go_to_the_earlier_sample_and_then_to_the_earlier_step():
    rows = [1, 3, 2]  # two falling turns of size 2, two rising of size 5, in one sample
    values = torch.cat([FIVE[[1, 3]], FIVE[[4]]])
    assert where(balance_turning_points(turning_points(values), values, 3)) == [(0, 1), (2, 0)]
    values = FIVE[rows]
    assert where(balance_turning_points(turning_points(values), values, 3)) == [
        (0, 1),
        (1, 1),
        (2, 0),
        (2, 3),
    ]
    values = FIVE[[1, 2]]
    assert where(balance_turning_points(turning_points(values), values, 2)) == [(0, 1), (1, 0)]


def test_a_group_of_one_kind_keeps_all_and_groups_do_not_see_each_other():
    values = FIVE[[0, 4, 1, 2]]
    turning = turning_points(values)
    assert where(balance_turning_points(turning, values, 2)) == [(0, 1), (1, 0), (2, 1), (3, 0)]
    assert torch.equal(balance_turning_points(turning[:2], values[:2], 2), turning[:2])


@quick
@given(values=some_values(), constraint=st.sampled_from(["consistent", "none"]))
def test_balanced_turning_points_are_equally_many_or_all(values, constraint):
    turning = turning_points(values, constraint)
    kept = balance_turning_points(turning, values, len(values)) > 0
    overall = values[:, -1:] - values[:, :1]
    for r in range(values.shape[-1]):
        all_of_them, sign = (turning > 0)[..., r], overall[..., r].sign()
        before = [int((all_of_them & (sign == s)).sum()) for s in (1, -1)]
        after = [int((kept[..., r] & (sign == s)).sum()) for s in (1, -1)]
        assert not (kept[..., r] & ~all_of_them).any()
        assert after == (before if 0 in before else [min(before)] * 2)
        for s in (1, -1):
            sizes = (overall[..., r].abs().expand_as(all_of_them), all_of_them & (sign == s))
            stay, go = sizes[0][sizes[1] & kept[..., r]], sizes[0][sizes[1] & ~kept[..., r]]
            assert len(go) == 0 or stay.min() >= go.max()


@quick
@given(seed=st.integers(0, 10**6), permutation=st.permutations(range(6)))
def test_the_order_of_samples_does_not_matter_where_sizes_differ(seed, permutation):
    values = torch.randn(6, 7, 2, generator=torch.Generator().manual_seed(seed))
    sizes = (values[:, -1] - values[:, 0]).abs()
    assume(all(len(size.unique()) == 6 for size in sizes.T))
    mixed = values[permutation]
    plain = balance_turning_points(turning_points(values), values, 6)
    assert torch.equal(balance_turning_points(turning_points(mixed), mixed, 6), plain[permutation])


# Recordings ---------------------------------------------------------------------------------------

VARIANTS = {
    "released_unbalanced": {},
    "def41_unbalanced": {"constraint": "none"},
    "no_first_step": {"first_step": False},
}


@pytest.mark.parametrize("m", range(3))
@pytest.mark.parametrize("variant", VARIANTS)
def test_step_rewards_of_the_reference(variant, m):
    golden = load("D_turningpoint", f"{variant}.")
    values = golden["V"][m, ..., None]
    turning = turning_points(values, **VARIANTS[variant])
    got = turning_point_credit(values, turning)[..., 0]
    # The reference takes a bonus of exactly 0 for none, and pays the gain.
    nothing = (turning[..., 0] > 0) & (values[:, -1:, 0] == values[:, :-1, 0])
    assert int(nothing.sum()) == (2 if (variant, m) == ("def41_unbalanced", 1) else 0)
    assert_close(got[~nothing], golden["process_rewards"][m][~nothing], rtol=1e-6, atol=0)
    assert_close(gains(values)[..., 0], golden["d_list"][m], rtol=1e-6, atol=0)
    if variant == "released_unbalanced":
        assert torch.equal(turning[..., 0] > 0, golden["turning"][m])
        assert golden["turning"][m].sum() > 2


@pytest.mark.parametrize("m", range(3))
def test_balanced_step_rewards_of_the_reference(m):
    """Micro-batch 1 has ties at the cut, where the reference takes any: only the sizes are its."""
    golden = load("D_turningpoint", "released.")
    values = golden["V"][m, ..., None]
    turning = balance_turning_points(turning_points(values), values, group_size=9)
    got = turning_point_credit(values, turning)[..., 0]
    kept, overall = turning[..., 0] > 0, (values[:, -1] - values[:, 0]).expand(-1, 9)
    assert_close(overall[kept].sort()[0], overall[golden["turning"][m]].sort()[0])
    if golden["selection_tie_free"][m]:
        assert torch.equal(kept, golden["turning"][m])
        assert_close(got, golden["process_rewards"][m], rtol=1e-6, atol=0)
    cut = not torch.equal(kept, turning_points(values)[..., 0] > 0)
    assert cut == bool(golden["selection_cut"][m])


def test_balancing_all_micro_batches_as_one_group_is_recorded_too():
    golden = load("D_turningpoint", "released_joint.")
    values = golden["V"].reshape(27, 10, 1)
    turning = turning_points(values)
    kept = balance_turning_points(turning, values, group_size=27)
    assert ((turning > 0).sum(), (kept > 0).sum()) == (29, 18)
    got = turning_point_credit(values, kept)[..., 0]
    assert_close(got, golden["process_rewards"], rtol=1e-6, atol=0)


def test_advantages_of_the_reference_compare_step_rewards_per_prompt_and_step():
    golden = load("D_turningpoint", "released.")
    value = golden["process_rewards"].double().view(27, 9, 1)
    group = golden["prompt_index"][:, None] * 9 + torch.arange(9)
    everywhere, weight = torch.ones(27, 9, dtype=torch.bool), torch.ones(1, dtype=torch.float64)
    got = advantages(value, group, everywhere, weight)
    assert_close(got, golden["advantages_group_std"], rtol=1e-6, atol=1e-12)
    for k in range(9):  # one tracker per step
        only = everywhere & (torch.arange(9) == k)
        got = advantages(value, group, only, weight, scale="batch")[:, k]
        assert_close(got, golden["advantages_global_std"][:, k], rtol=1e-6, atol=1e-12)


# Lambda returns -----------------------------------------------------------------------------------


def test_a_missing_value_spoils_the_lambda_returns_until_it():
    got = lambda_returns(column(0.0, NAN, 12.0, 14.0), 0.5).flatten()
    assert got.isnan().tolist() == [True, True, False]


@quick
@given(values=some_values(), decay=st.sampled_from([0.25, 0.5, 1.0]))
def test_lambda_returns_are_a_gain_and_the_discounted_rest(values, decay):
    got, gained = lambda_returns(values, decay), gains(values)
    assert torch.equal(got[:, -1], gained[:, -1])
    assert torch.equal(got[:, :-1], gained[:, :-1] + decay * got[:, 1:])
    assert decay < 1 or torch.equal(got, values[:, -1:] - values[:, :-1])
