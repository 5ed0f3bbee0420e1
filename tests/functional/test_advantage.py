"""Advantages against arithmetic by hand, recordings and invariances."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, tensor
from torch.testing import assert_close

from flowalign.functional.advantage import (
    add_places,
    advantages,
    compare_places,
    favour_diversity,
    group_center,
    group_mean,
    most_uncertain,
    nearest_distance,
    nft_of_places,
    place_log_ratio,
    reward_uncertainty,
    split_places,
    weigh_places,
    win_share,
    zero_spread_share,
)
from flowalign.functional.forward_process import nft
from flowalign.functional.transition import CPS, FlowSDE, Gaussian, log_density
from tests.fixtures.golden import load

quick = settings(max_examples=40, deadline=None, database=None)

# Group 5: 1, 2, 6 (mean 3, variance 14/3 or 7); group 2: 10, 14 (mean 12, variance 4 or 8).
# Second dimension, group 5: 0, 0, 3 (mean 1, variance 2 or 3); group 2 is flat.
VALUE = torch.tensor([[1.0, 0.0], [10.0, 7.0], [2.0, 0.0], [14.0, 7.0], [6.0, 3.0]])
GROUP = torch.tensor([5, 2, 5, 2, 5])
CENTRED = torch.tensor([[-2.0, -1.0], [-2.0, 0.0], [-1.0, -1.0], [2.0, 0.0], [3.0, 2.0]])
SCALES = ["group", "batch", "joint", "none", "leave_one_out"]


# By hand ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "correction", "std5", "std2", "second5"),
    [
        ("group", 0, (14 / 3) ** 0.5, 2.0, 2**0.5),
        ("group", 1, 7**0.5, 8**0.5, 3**0.5),
        ("joint", 0, (14 / 3) ** 0.5, 2.0, 2**0.5),
        # The batch has mean 6.6 and squares 119.2; its second dimension mean 3.4 and squares 49.2.
        ("batch", 0, (119.2 / 5) ** 0.5, (119.2 / 5) ** 0.5, (49.2 / 5) ** 0.5),
        ("batch", 1, (119.2 / 4) ** 0.5, (119.2 / 4) ** 0.5, (49.2 / 4) ** 0.5),
    ],
)
def test_group_center_by_hand(scale, correction, std5, std2, second5):
    first = torch.tensor([std5, std2, std5, std2, std5]) + 0.5
    divisor = torch.stack([first, torch.full((5,), second5 + 0.5)], 1)
    got = group_center(VALUE, GROUP, scale, eps=0.5, correction=correction)
    assert_close(got, CENTRED / divisor)


@pytest.mark.parametrize("correction", [0, 1])
def test_scale_none_only_subtracts_the_group_mean(correction):
    assert_close(group_center(VALUE, GROUP, "none", eps=0.5, correction=correction), CENTRED)


@pytest.mark.parametrize("correction", [0, 1])
def test_leave_one_out_subtracts_the_mean_of_the_others_whatever_the_size_of_the_group(correction):
    """In group 5 the others of 1, 2 and 6 have means 4, 3.5 and 1.5; of 0, 0 and 3: 1.5, 1.5, 0."""
    got = group_center(VALUE, GROUP, "leave_one_out", eps=0.5, correction=correction)
    first = [1 - 4.0, 10 - 14.0, 2 - 3.5, 14 - 10.0, 6 - 1.5]
    assert_close(got, torch.tensor([first, [-1.5, 0.0, -1.5, 0.0, 3.0]]).T)


def test_joint_pools_what_group_ids_pool():
    """One id for all: mean 6.6 and variance 119.2 / 5."""
    got = group_center(VALUE[:, :1], torch.zeros(5, dtype=torch.int64), "joint", eps=0.0)
    assert_close(got, (VALUE[:, :1] - 6.6) / (119.2 / 5) ** 0.5)


def test_group_mean_by_hand():
    index = torch.tensor([1, 0, 1, 0, 1])
    expected = [[3.0, 1.0], [12.0, 7.0], [3.0, 1.0], [12.0, 7.0], [3.0, 1.0]]
    assert group_mean(VALUE, index).tolist() == expected


@pytest.mark.parametrize("scale", SCALES)
def test_a_group_below_the_std_floor_is_zero_and_the_others_are_unchanged(scale):
    """Group 2 has std 2, group 5 has 2.16."""
    value = VALUE[:, :1]
    low, high = (group_center(value, GROUP, scale, std_floor=floor) for floor in (1.9, 2.1))
    in_two = GROUP == 2
    assert low[in_two].all()
    assert not high[in_two].any()
    assert_close(low[~in_two], high[~in_two])
    assert high[~in_two].all()


def test_masked_transitions_get_zero_and_do_not_shift_the_statistics():
    """Rows 1, 3 and 8 of one group are seen, mean 4; the 99 and -50 are not."""
    value = torch.tensor([[[1.0], [99.0]], [[3.0], [-50.0]], [[8.0], [0.0]]])
    mask = torch.tensor([[True, False], [True, False], [True, False]])
    weights = torch.tensor([2.0])
    got = advantages(value, torch.zeros(3, 2, dtype=torch.int64), mask, weights, scale="none")
    assert got.tolist() == [[-6.0, 0.0], [-2.0, 0.0], [8.0, 0.0]]
    for scale in ("group", "batch"):  # variance (9 + 1 + 16) / 3
        got = advantages(value, torch.zeros(3, 2, dtype=torch.int64), mask, weights, scale=scale)
        expected = torch.tensor([-6.0, -2.0, 8.0]) / ((26 / 3) ** 0.5 + 1e-4)
        assert_close(got[:, 0], expected)
        assert not got[:, 1].any()


def test_groups_may_cross_samples_and_steps():
    """Group 4 holds (0, 0) and (1, 1), group 9 the other two: pairs 1, 7 and 2, 20."""
    value = torch.tensor([[[1.0], [2.0]], [[20.0], [7.0]]])
    group, mask = torch.tensor([[4, 9], [9, 4]]), torch.ones(2, 2, dtype=torch.bool)
    got = advantages(value, group, mask, torch.tensor([1.0]), scale="none")
    assert got.tolist() == [[-3.0, -9.0], [9.0, 3.0]]


REWARDS = torch.tensor([[[0.0, 30.0]], [[1.0, 10.0]], [[5.0, 20.0]]])  # means 2 and 20
WEIGHTS = torch.tensor([3.0, 0.5])


@pytest.mark.parametrize(("correction", "var1", "var2"), [(0, 14 / 3, 200 / 3), (1, 7.0, 100.0)])
def test_sum_of_advantages_normalises_each_reward_on_its_own(correction, var1, var2):
    ids, mask = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1, dtype=torch.bool)
    got = advantages(REWARDS, ids, mask, WEIGHTS, correction=correction)
    first = torch.tensor([-2.0, -1.0, 3.0]) / (var1**0.5 + 1e-4)
    second = torch.tensor([10.0, -10.0, 0.0]) / (var2**0.5 + 1e-4)
    assert_close(got[:, 0], 3 * first + 0.5 * second)


@pytest.mark.parametrize("correction", [0, 1])
def test_advantage_of_sum_normalises_the_weighted_reward(correction):
    """The sums are 15, 8 and 25: mean 16, squares 1 + 64 + 81 = 146."""
    ids, mask = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1, dtype=torch.bool)
    var = 146 / (3 - correction)
    got = advantages(REWARDS, ids, mask, WEIGHTS, combine="advantage_of_sum", correction=correction)
    assert_close(got[:, 0], torch.tensor([-1.0, -8.0, 9.0]) / (var**0.5 + 1e-4))


@pytest.mark.parametrize("combine", ["sum_of_advantages", "advantage_of_sum"])
def test_advantages_keep_the_dtype_of_the_credit(combine):
    ids, mask = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1, dtype=torch.bool)
    args = ids, mask, WEIGHTS.double()
    got = advantages(REWARDS.double(), *args, combine=combine)
    assert got.dtype == torch.float64
    assert got.all()


@pytest.mark.parametrize("combine", ["sum_of_advantages", "advantage_of_sum"])
def test_advantages_hand_the_std_floor_on(combine):
    """The first reward has std 2.16, and weighted 6.48; the second does not count."""
    ids, mask = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1, dtype=torch.bool)
    only_first = torch.tensor([3.0, 0.0])
    args = REWARDS, ids, mask, only_first
    floor = 2.17 if combine == "sum_of_advantages" else 6.49
    assert advantages(*args, combine=combine, std_floor=floor - 0.1).all()
    assert not advantages(*args, combine=combine, std_floor=floor).any()


@pytest.mark.parametrize("combine", ["sum_of_advantages", "advantage_of_sum"])
def test_nothing_trained_means_no_advantage(combine):
    ids, mask = torch.zeros(3, 1, dtype=torch.int64), torch.zeros(3, 1, dtype=torch.bool)
    got = advantages(REWARDS, ids, mask, WEIGHTS, combine=combine)
    assert got.tolist() == [[0.0], [0.0], [0.0]]


def test_zero_spread_share_by_hand():
    """Groups 8 (flat) and 5 (one member) give no signal; 3 (1 and 2) does; 1 differs by .1."""
    value = torch.tensor([4.0, 1.0, 9.0, 4.0, 2.0, 0.0, 0.1])
    group = torch.tensor([8, 3, 5, 8, 3, 1, 1])
    assert zero_spread_share(value, group) == pytest.approx(2 / 4)
    assert zero_spread_share(value, group, std_floor=0.06) == pytest.approx(3 / 4)


@pytest.mark.parametrize("size", [1e-7, 1e-4, 1.0, 1e5])
def test_rewards_of_any_scale_have_a_signal_unless_they_differ_by_rounding(size):
    group = torch.tensor([0, 0, 0, 1, 1, 1])
    signal, noise = [0.31, 0.33, 0.32], [0.3, 0.3 + 6e-8, 0.3 - 6e-8]
    value = size * torch.tensor([*signal, *noise])
    got = group_center(value[:, None], group, "group", eps=0.0)[:, 0]
    assert_close(got[:3], torch.tensor([-1.5, 1.5, 0.0]) / 1.5**0.5, atol=1e-3, rtol=0)
    assert got[3:].tolist() == [0.0, 0.0, 0.0]
    assert zero_spread_share(value, group) == 0.5


# Invariances --------------------------------------------------------------------------------------


@quick
@example(value=21.700000762939453, num=24, scale="group")
@given(value=st.floats(-1e4, 1e4, width=32), num=st.integers(2, 40), scale=st.sampled_from(SCALES))
def test_flat_groups_give_exactly_zero_whatever_their_value(value, num, scale):
    """The mean of 24 times 21.7 in float32 is not 21.7. A second group varies as it should."""
    flat = torch.full((num, 1), value)
    rewards = torch.cat([flat, torch.tensor([[1.0], [4.0]])])
    group = torch.tensor([3] * num + [1, 1])
    for eps in (1e-4, 0.0):
        got = group_center(rewards, group, scale, eps=eps)
        assert not got[:num].any()
        assert got[num:].isfinite().all()
        assert got[num:].all()
    assert zero_spread_share(rewards[:, 0], group) == 0.5


def test_a_group_of_one_gives_zero():
    value, group = torch.tensor([[3.0], [1.0], [2.0]]), torch.tensor([0, 1, 1])
    for scale in SCALES:
        for correction in (0, 1):
            got = group_center(value, group, scale, correction=correction)
            assert got[0] == 0
            assert got[1:].all()


@quick
@given(order=st.permutations(range(5)), scale=st.sampled_from(SCALES), combined=st.booleans())
def test_advantages_follow_a_permutation_of_the_samples(order, scale, combined):
    combine = "advantage_of_sum" if combined else "sum_of_advantages"
    mask = torch.tensor([True, True, True, True, False])[:, None]
    rows = VALUE[:, None], GROUP[:, None], mask
    kwargs = {"scale": scale, "combine": combine}
    straight = advantages(*rows, WEIGHTS, **kwargs)
    permuted = advantages(*(t[list(order)] for t in rows), WEIGHTS, **kwargs)
    assert straight[:4].any()
    assert_close(permuted, straight[list(order)])


@quick
@given(ids=st.permutations([0, 3, 11, 400]))
def test_only_the_equality_of_ids_matters(ids):
    group = (GROUP == 5).long()
    renamed = torch.tensor(ids)[group]
    for scale in SCALES:
        assert_close(group_center(VALUE, renamed, scale), group_center(VALUE, GROUP, scale))


@quick
@given(shift=st.floats(-5, 5), factor=st.floats(0.1, 10))
def test_group_scale_ignores_shift_and_scale_of_each_group(shift, factor):
    value = VALUE[:, :1].double()
    moved = torch.where(GROUP[:, None] == 5, factor * value + shift, value - 2 * shift)
    got = group_center(moved, GROUP, "group", eps=0.0)
    assert_close(got, group_center(value, GROUP, "group", eps=0.0))
    assert_close((got[GROUP == 5] ** 2).mean(), torch.tensor(1.0, dtype=torch.float64))


# Recordings ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load("C_advantages")


def one(value: Tensor, group: Tensor, *args, **kwargs) -> Tensor:
    return group_center(value[:, None], group, *args, **kwargs)[:, 0]


@pytest.mark.parametrize(("scale", "name"), [("group", "group_std"), ("batch", "global_std")])
def test_flow_grpo_advantages_match_the_recording(scale, name, golden):
    exact = {"rtol": 1e-9, "atol": 1e-12}
    rewards, group = golden["rewards"], golden["group"]
    got = one(rewards, group, scale)
    assert_close(got, golden[f"flow_grpo.{name}"], **exact)
    again = one(rewards * 1.1 + 0.05, group, scale)
    assert_close(again, golden[f"flow_grpo.{name}.after_clear"], **exact)
    assert not got[group == 0].any()  # its rewards are all .75


def test_flow_grpo_advantages_of_two_rewards_match_the_recording(golden):
    both = torch.stack([golden["rewards"], golden["rewards2"]], 1)
    got = group_center(both, golden["group"], "group")
    assert_close(got, golden["flow_grpo.two_dim"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("combine", ["sum_of_advantages", "advantage_of_sum"])
def test_advantages_of_one_reward_are_those_of_flow_grpo(combine, golden):
    """Rows laid out as 10 samples of 3 transitions."""
    value, group = golden["rewards"].reshape(10, 3, 1), golden["group"].reshape(10, 3)
    mask, weights = torch.ones(10, 3, dtype=torch.bool), torch.ones(1, dtype=torch.float64)
    got = advantages(value, group, mask, weights, combine=combine)
    assert_close(got.flatten(), golden["flow_grpo.group_std"], rtol=1e-9, atol=1e-12)


def test_dance_advantages_match_the_recording(golden):
    """Its global variant also subtracts the mean of the batch: one group."""
    value, group = golden["sorted_rewards"], golden["group"].sort().values
    got = one(value, group, "group", eps=1e-8, correction=1)
    assert_close(got, golden["dance.group"], rtol=1e-5, atol=1e-6)
    assert not got[group == 0].any()
    got = one(value, torch.zeros_like(group), "group", eps=1e-8, correction=1)
    assert_close(got, golden["dance.global"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "scale"),
    [("group", "group"), ("global", "batch"), ("group_nostd", "none"), ("global_nostd", "none")],
)
def test_verl_advantages_match_the_recording(name, scale, golden):
    got = one(golden["rewards"].float(), golden["group"], scale, correction=1)
    assert_close(got, golden[f"verl.{name}"], rtol=1e-5, atol=1e-6)


def test_mixgrpo_aggregations_match_the_recording(golden):
    """Advantages weighted 1 and .5, or one advantage of rewards weighted 1 and .05."""
    both = torch.stack([golden["sorted_rewards"], golden["sorted_rewards2"]], 1)
    group, fp32 = golden["group"].sort().values, {"rtol": 1e-5, "atol": 1e-5}
    each = group_center(both, group, "group", eps=1e-8, correction=1)
    assert_close(each @ torch.tensor([1.0, 0.5]), golden["mix.advantage_aggr"], **fp32)
    total = one(both @ torch.tensor([1.0, 0.05]), group, "group", eps=1e-8, correction=1)
    assert_close(total, golden["mix.reward_aggr"], **fp32)


@pytest.mark.parametrize("sampler", ["distributed_k_repeat", "group_contiguous"])
def test_flow_factory_aggregations_match_the_recording(sampler, golden):
    """In fp32, hence the tolerance. gdpo sums advantages and normalises them over the batch."""
    both = torch.stack([golden["rewards"], golden["rewards2"]], 1)
    group, weights = golden["group"], torch.tensor([1.0, 0.3], dtype=torch.float64)
    for scale, name in (("group", "sum_group"), ("batch", "sum_global")):
        got = one(both @ weights, group, scale, eps=0.0)
        assert_close(got, golden[f"ff.{name}.{sampler}"], rtol=0, atol=4e-5)
    summed = group_center(both, group, "group", eps=0.0) @ weights
    gdpo = one(summed, torch.zeros_like(group), "group", eps=0.0)
    assert_close(gdpo, golden[f"ff.gdpo.{sampler}"], rtol=0, atol=4e-5)


# Which samples GARDO holds back by a KL, and its advantages of diverse samples --------------------


MAIN, AUXILIARY = tensor([0.9, 0.1, 0.5, 0.7]), tensor([[0.1], [0.9], [0.5], [0.7]])


def test_uncertainty_is_high_where_only_the_optimized_reward_likes_a_sample():
    """Eq. (7); the gate of the released code is -3, 3, 0, 0 in ranks."""
    assert_close(reward_uncertainty(MAIN, AUXILIARY), tensor([1.0, -1.0, 0.0, 0.0]))
    assert most_uncertain(reward_uncertainty(MAIN, AUXILIARY), 0.25).tolist() == [
        True,
        False,
        False,
        False,
    ]


def test_a_monotone_copy_of_the_reward_has_no_uncertainty():
    assert reward_uncertainty(MAIN, MAIN[:, None].exp()).abs().max() == 0


def test_ties_win_nothing_and_a_failed_reward_is_not_gated():
    assert_close(win_share(tensor([1.0, 0.0, 1.0])), tensor([0.5, 0.0, 0.5]))
    failed = reward_uncertainty(tensor([torch.nan, 1.0, 2.0]), tensor([[1.0], [2.0], [3.0]]))
    assert failed.isnan().tolist() == [True, False, False]
    assert not most_uncertain(failed, 0.5)[0]
    assert most_uncertain(failed, 1.0).all()


def test_without_ties_the_batch_mean_is_zero():
    generator = torch.Generator().manual_seed(0)
    main, auxiliary = torch.randn(64, generator=generator), torch.randn(64, 2, generator=generator)
    assert_close(reward_uncertainty(main, auxiliary).mean(), tensor(0.0), atol=1e-6, rtol=0)


def test_duplicates_earn_nothing_and_bad_samples_stay_as_they_are():
    """Two groups of two and of orthogonal and equal features."""
    features = tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0], [1.0, 0.0]])
    distance = nearest_distance(features, 2)
    assert_close(distance, tensor([1.0, 1.0, 0.0, 0.0]))
    shaped = favour_diversity(tensor([[2.0], [-1.0], [2.0], [-1.0]]), distance)
    assert shaped[:, 0].tolist() == [2.0, -1.0, 0.0, -1.0]


# Advantages of latent positions: weights, comparisons, log-ratios and NFT -------------------------


def rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_advantages_follow_the_map_and_keep_their_mean():
    good = tensor([[[[0.0, 2.0]]], [[[1.5, 0.5]]]])
    bad = tensor([[[[2.0, 0.0]]], [[[1.0, 1.0]]]])
    places = weigh_places(tensor([[1.0, -2.0], [3.0, 0.0]]), good, bad, 0.5)
    assert places.shape == (2, 2, 1, 1, 2)
    assert_close(places[0, :, 0, 0], tensor([[0.5, 1.5], [-3.0, -1.0]]))
    assert_close(places.mean((2, 3, 4)), tensor([[1.0, -2.0], [3.0, 0.0]]))


def test_maps_of_a_group_are_compared_at_each_place():
    """The maps 1, 0 and 0, 0 have the mean 1/2 at the first place; all have std sqrt(3)/4."""
    maps = tensor([[[[1.0, 0.0]]], [[[0.0, 0.0]]]])
    found = compare_places(maps, 2)
    unit = 0.5 / (3**0.5 / 4)
    assert_close(found[:, 0, 0], tensor([[unit, 0.0], [-unit, 0.0]]))
    both = add_places(tensor([[2.0], [-2.0]]), found, 0.25)
    assert_close(both[0, 0, 0, 0], tensor([1.5 + 0.25 * unit, 1.5]))
    assert compare_places(torch.ones(2, 1, 1, 2), 2).abs().max() == 0


def test_an_advantage_and_weights_make_the_advantages_of_places():
    places = tensor([[[[3.0, -1.0]]], [[[-1.0, -3.0]]], [[[0.0, 0.0]]]])
    a, weight = split_places(places, tensor([1.0, -2.0, 0.0]))
    assert_close(a, tensor([2.0, -2.0, 0.0]))
    assert_close(weight[:, 0, 0], tensor([[1.5, -0.5], [0.5, 1.5], [1.0, 1.0]]))


@pytest.mark.parametrize("kernel", [FlowSDE(), CPS()])
def test_equal_weights_give_the_log_ratio_of_the_transition(kernel):
    x, old, now = rows(3, 4, 2, 2), rows(3, 4, 2, 2, seed=1), rows(3, 4, 2, 2, seed=2)
    std = tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    current, before = Gaussian(now, std), Gaussian(old, std)
    expected = log_density(kernel, x, current) - log_density(kernel, x, before)
    ones = torch.ones(3, 1, 2, 2, dtype=torch.float64)
    assert_close(place_log_ratio(kernel, x, current, old, ones), expected)


def test_the_gradient_goes_only_where_the_weight_is():
    x, old = rows(1, 2, 1, 2), rows(1, 2, 1, 2, seed=1)
    mean = old.clone().requires_grad_()
    one = torch.ones(1, dtype=torch.float64)
    weight = tensor([[[[0.0, 2.0]]]], dtype=torch.float64)
    value = place_log_ratio(FlowSDE(), x, Gaussian(mean, one), old, weight)
    (slope,) = torch.autograd.grad(value.sum(), mean)
    assert slope[..., 0].abs().max() == 0
    assert_close(slope[..., 1], 2 * (x - old)[..., 1] / 4)


def test_nft_with_equal_places_is_nft_and_places_do_not_mix():
    policy, old = rows(2, 3, 2, 2).requires_grad_(), rows(2, 3, 2, 2, seed=1)
    sigma, optimal = tensor([0.3, 0.8]).double(), tensor([0.2, 0.9]).double()
    places = optimal.reshape(2, 1, 1, 1).expand(2, 1, 2, 2)
    assert_close(
        nft_of_places(policy, old, sigma, places, 0.5), nft(policy, old, sigma, optimal, 0.5)
    )
    local = places.clone()
    local[0, 0, 0, 0] = 0.7
    change = nft_of_places(policy, old, sigma, local, 0.5) - nft_of_places(
        policy, old, sigma, places, 0.5
    )
    (slope,) = torch.autograd.grad(change.sum(), policy)
    assert slope[0, :, 0, 0].abs().min() > 0
    slope[0, :, 0, 0] = 0
    assert slope.abs().max() < 1e-12
