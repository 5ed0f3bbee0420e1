"""Rewards in the loop: scored in parallel with sampling, by groups, transformed, and bounded."""

import math
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from flowalign.api.objects import share_rewards
from flowalign.credit.chain import Gain
from flowalign.data.requests import read_requests
from flowalign.functional import pairing
from flowalign.rewards import (
    LogSigmoidCentred,
    RewardFailure,
    Rewards,
    Thresholds,
    TransformedValues,
    combine,
)
from flowalign.rewards.combine import Multipliers
from flowalign.rewards.function_reward import CallableReward
from flowalign.training.checkpoint import restore, save
from flowalign.training.rollouts.advantages import not_dominated
from flowalign.training.rollouts.collecting import collect_rollouts, completion_values, rollout
from flowalign.types import (
    JudgeCalls,
    MediaBatch,
    PastOutcomes,
    Request,
    RewardSpec,
    plain_requests,
)
from reward_models.wrappers.composed import Shifted, list_shifts, shift
from tests.fixtures.credited import Given, credited
from tests.fixtures.pixel import Redness
from tests.fixtures.rated import Rated
from tests.fixtures.training import flat, new_learner, new_recipe, new_rewards, train

THREE = ["a", "bb", "ccc"]


class Waiting(Redness):
    """Redness that waits for an event elsewhere."""

    def __init__(self, happened, *dims):
        super().__init__()
        self.happened, self.calls, self.threads = happened, [], set()
        if dims:
            self.spec = RewardSpec(dims[0], dims, "any", (-1.0, 1.0), "Apache-2.0")

    def score(self, batch):
        self.calls.append(len(batch))
        self.threads.add(threading.get_ident())
        assert self.happened(), "nothing happened meanwhile"
        return super().score(batch)


class Earlier(Given):
    """Values of prompts that had outcomes before."""

    def __init__(self, known):
        super().__init__(known.value)
        self.known = known

    def past(self, num_steps):
        return self.known


def rank() -> Rated:
    """The share of its group that a sample is redder than."""

    def rate(batch):
        red, group = batch.media[:, 0, 0, 0, 0], torch.tensor(list(batch.groups))
        same = group[:, None] == group
        wins = ((red[:, None] > red) & same).sum(1)
        return wins / (same.sum(1) - 1).clamp(min=1)

    return Rated(rate, "rank", needs=("groups",))


@pytest.mark.slow
@pytest.mark.parametrize("credit", [None, Gain()], ids=["outcome", "gain"])
@pytest.mark.parametrize("at_once", [1, 3, 7])
def test_sampling_some_prompts_at_a_time_changes_nothing(credit, at_once):
    extra = {"credit": credit} if credit else {}
    results = []
    for rollout_batch_prompts in (None, at_once):
        learner = new_learner()
        cfg = new_recipe({"micro_batch": 5}, rollout_batch_prompts=rollout_batch_prompts, **extra)
        metrics = train(cfg, learner, steps=2)
        results.append((metrics, flat(learner.policy.denoiser)))
    (whole, weights), (batched, same) = results
    assert_close(same, weights, atol=1e-6, rtol=1e-5)
    for name, value in whole[-1].items():
        if not name.startswith(("timing", "throughput")):
            assert batched[-1][name] == pytest.approx(value, abs=1e-5, nan_ok=True), name


def test_rewards_of_one_batch_are_computed_while_the_next_is_sampled():
    """The first batch's rewards wait until the second is being sampled."""
    second, calls, learner = threading.Event(), [], new_learner()
    model, velocity = Waiting(lambda: second.wait(20)), learner.policy.velocity

    def watched(x, sigma, cond):
        calls.append(sigma)
        if len(calls) > 4:
            second.set()
        return velocity(x, sigma, cond)

    learner.policy.velocity = watched
    cfg = new_recipe(rollout_batch_prompts=1)
    collect_rollouts(
        cfg.rollouts, learner, Rewards([model], {"redness": 1.0}), plain_requests(THREE), 0, 0
    )([4])
    assert model.calls == [4, 4, 4]
    assert len(calls) == 3 * 4


def test_models_run_beside_each_other_each_in_one_thread():
    both = threading.Barrier(2, timeout=20)
    models = [Waiting(lambda: both.wait() >= 0), Waiting(lambda: both.wait() >= 0, "other", "more")]
    batch = MediaBatch(torch.rand(3, 1, 3, 2, 2), THREE)
    scoring = Rewards(models, {"redness": 1.0}).scoring()
    scoring.add(batch)
    scoring.add(batch.take([2, 0]))
    output = scoring.result()
    assert output.values.shape == (5, 4)
    assert_close(output.values[3:], output.values[[2, 0]])
    assert all(len(model.threads) == 1 for model in models)
    assert models[0].threads != models[1].threads


@pytest.mark.parametrize("micro_batch", [3, 64])
def test_groupwise_models_see_whole_groups_whatever_the_chunks(micro_batch):
    model, learner = rank(), new_learner()
    cfg = new_recipe({"micro_batch": micro_batch})
    rewards = Rewards([Redness(), model], {"rank": 1.0})
    trajectory = rollout(cfg.rollouts, learner, plain_requests(THREE), 0, 0)
    values = completion_values(cfg.rollouts, learner, rewards, trajectory)([4])[:, 0]
    (asked,) = model.asked
    assert [len(set(asked.groups[i : i + 4])) for i in (0, 4, 8)] == [1, 1, 1]
    assert len(set(asked.groups)) == 3
    red = learner.policy.decode(trajectory.state(4))[:, 0, 0, 0, 0].view(3, 4)
    wanted = (red[:, :, None] > red[:, None]).sum(2).flatten() / 3
    assert_close(values[:, 2], wanted)


def test_states_of_different_steps_are_different_groups():
    model, learner = rank(), new_learner()
    cfg = new_recipe(credit=Gain())
    trajectory = rollout(cfg.rollouts, learner, plain_requests(THREE), 0, 0)
    completion_values(cfg.rollouts, learner, Rewards([model], {"rank": 1.0}), trajectory)([1, 4])
    assert len(set(model.asked[0].groups)) == 6


def test_metadata_of_a_prompt_reaches_the_models(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "text": "A"}\n\n{"prompt": "bb", "n": 2}\n')
    seen = []

    class Reader(Redness):
        def score(self, batch):
            seen.extend(batch.metadata)
            return super().score(batch)

    rewards = Rewards([Reader()], {"redness": 1.0})
    first, second = read_requests(str(file))
    rewards.score(rewards.batch(torch.rand(3, 1, 3, 2, 2), [second, first, Request("?")]))
    assert seen == [{"n": 2}, {"text": "A"}, {}]


def test_loading_prepares_the_models_that_need_it():
    heavy = Rated(torch.zeros_like, "heavy")
    Rewards([Redness(), heavy], {"redness": 1.0}).load()
    assert heavy.loads == 1


# Combining ----------------------------------------------------------------------------------------


def test_log_sigmoid_centred_by_hand_and_only_where_named():
    transform = LogSigmoidCentred(reference={"b": 0.5}, scale=0.25)
    trajectory = replace(new_recipe().rollouts.empty_trajectory([0]), requests=plain_requests("xy"))
    values = torch.tensor([[[3.0, 0.5], [4.0, 1.0]], [[5.0, math.nan], [6.0, 0.0]]])
    given = TransformedValues(Given(values), ("a", "b"), transform, trajectory)([0, 1])
    half, two = math.log(0.5), math.log(1 / (1 + math.exp(-2)))
    wanted = [[[3.0, half], [4.0, two]], [[5.0, math.nan], [6.0, math.log(1 / (1 + math.exp(2)))]]]
    assert_close(given, torch.tensor(wanted), equal_nan=True)


def test_a_transform_needs_a_reference_for_each_weighted_dimension_and_no_other():
    rewards = new_rewards()
    LogSigmoidCentred(reference={"redness": 0.1}).check(rewards)
    with pytest.raises(ValueError, match=r"name green; they must name each of redness"):
        LogSigmoidCentred(reference={"green": 0.1}).check(rewards)


def test_a_reference_of_each_request_centres_the_rewards_of_its_own_samples():
    """log sigmoid((3 - 1) / 2), ((3 - 5) / 2) in a column of the request; (.5 - .5) in common."""
    transform = LogSigmoidCentred(reference={"b": 0.5}, reference_columns={"a": "usual"}, scale=2.0)
    requests = [Request("x", metadata={"usual": usual}) for usual in (1.0, 5)]
    found = transform(torch.tensor([[[3.0, 0.5]], [[3.0, 4.5]]]), ("a", "b"), requests)
    logs = [math.log(1 / (1 + math.exp(-x))) for x in (1, 0, -1, 2)]
    assert_close(found, torch.tensor(logs).view(2, 1, 2))


def test_outcomes_of_earlier_steps_are_centred_by_their_own_request():
    values = torch.tensor([[3.0], [3.0], [5.0]])
    transform = LogSigmoidCentred(reference_columns={"redness": "usual"})
    requests = [Request("x", metadata={"usual": u}) for u in (1.0, 1.0, 4.0, 4.0)]
    empty = new_recipe().rollouts.empty_trajectory([0])
    trajectory = replace(empty, requests=requests, group_size=2)
    given = Earlier(PastOutcomes(values, torch.tensor([1, 0, 1])))
    past = TransformedValues(given, ("redness",), transform, trajectory).past(1)
    assert past is not None
    logs = [math.log(1 / (1 + math.exp(-x))) for x in (-1, 2, 1)]
    assert_close(past.value, torch.tensor(logs)[:, None])


def test_a_request_without_its_reference_is_named_with_its_row():
    transform = LogSigmoidCentred(reference_columns={"redness": "usual"})
    transform.check(new_rewards())
    both = LogSigmoidCentred(reference={"redness": 0.0}, reference_columns={"redness": "usual"})
    with pytest.raises(ValueError, match="name redness, redness; they must name"):
        both.check(new_rewards())
    rows = [("p:1", Request("a", metadata={"usual": 2})), ("p:2", Request("b"))]
    with pytest.raises(ValueError, match=r"p:2: usual is None; .* the reward redness"):
        transform.check_requests(rows)
    for nonsense in (math.nan, True, "high"):
        with pytest.raises(ValueError, match=r"p:1: usual is"):
            transform.check_requests([("p:1", Request("a", metadata={"usual": nonsense}))])


def test_transformed_rewards_are_learned_from_and_raw_ones_reported():
    learner, reference = new_learner(), LogSigmoidCentred(reference={"redness": -5.0})
    trajectory = rollout(new_recipe().rollouts, learner, plain_requests(THREE), 0, 0)
    (plain, raw), (moved, same) = (
        credited(cfg, learner, completion_values(cfg.rollouts, learner, new_rewards(), trajectory))
        for cfg in (
            new_recipe(advantages={"scale": "none"}),
            new_recipe(advantages={"scale": "none", "value_transform": reference}),
        )
    )
    assert raw["reward/redness"] == same["reward/redness"]
    ratio = moved.advantage.abs().sum() / plain.advantage.abs().sum()
    assert 0.003 < ratio < 0.01, "far above the reference, log sigmoid is nearly flat: e^-5"


def test_dominated_samples_are_not_trained_and_the_baseline_is_everyones():
    learner = new_learner()
    trajectory = rollout(new_recipe().rollouts, learner, plain_requests(THREE), 0, 0)
    rewards = new_rewards(redness=1.0, green=1.0)
    (everyone, _), (some, metrics) = (
        credited(cfg, learner, completion_values(cfg.rollouts, learner, rewards, trajectory))
        for cfg in (new_recipe(), new_recipe(advantages={"pareto": "group"}))
    )
    values = completion_values(new_recipe().rollouts, learner, rewards, trajectory)
    final = values([4])[:, 0].view(3, 4, 2)
    a, b = final[:, :, None], final[:, None]
    keep = ~((a >= b).all(3) & (a > b).any(3)).any(1).flatten()
    assert 0 < keep.sum() < 12
    assert torch.equal(some.mask, everyone.mask & keep[:, None])
    assert_close(some.advantage, everyone.advantage)
    assert metrics["dominated"] == pytest.approx(1 - float(keep.float().mean()))


def test_one_weighted_dimension_leaves_the_best_of_the_batch_only():
    final = torch.tensor([[1.0, 9.0], [3.0, 0.0], [2.0, 5.0], [3.0, 1.0]])
    rewards, group = new_rewards(), torch.tensor([0, 0, 1, 1])
    assert not_dominated("batch", final, group, rewards).tolist() == [False, True, False, True]
    assert not_dominated("group", final, group, rewards).tolist() == [False, True, False, True]
    assert not_dominated("off", final, group, rewards).all()


def test_a_dimension_beyond_its_threshold_loses_weight_and_one_below_gains():
    for at, rises in ((5.0, True), (-5.0, False)):
        cfg = new_recipe(advantages={"thresholds": Thresholds(at={"redness": at})})
        weights = [m["weight/redness"] for m in train(cfg, new_learner(), new_rewards(), steps=3)]
        assert weights[0] == 0.5
        assert (weights[2] > weights[1] > weights[0]) == rises


def test_thresholds_refuse_unweighted_dimensions():
    with pytest.raises(ValueError, match="weighted dimensions, not 'green'; there are redness"):
        Thresholds(at={"green": 1.0}).check(new_rewards())
    with pytest.raises(ValueError, match="threshold of at least one dimension"):
        Thresholds(at={})


def test_multipliers_survive_a_checkpoint_bit_for_bit(tmp_path):
    start = Thresholds(at={"a": 0.3}).start(("a", "b"))
    later = start.update(torch.tensor([0.9, math.nan])).update(torch.tensor([-0.7, math.nan]))
    learner = new_learner()
    folder = save(tmp_path, 1, learner, "x: 1", {"multipliers": later.state()})
    again: Multipliers = start.restore(restore(folder, learner)["multipliers"])
    assert torch.equal(again.raw, later.raw)
    assert torch.equal(again.velocity, later.velocity)
    assert later.raw[0] != 0


# Combining reward dimensions: by hand, against brute force, and invalid rewards change ------------


NAN = math.nan


def rows(*values):
    return torch.tensor(values)


def known(value):
    return value.isfinite()


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_means_are_over_valid_samples():
    value, valid = rows([1.0, 7.0], [3.0, 9.0]), rows([True, False], [True, False])
    assert_close(combine.valid_mean(value, valid), torch.tensor([2.0, NAN]), equal_nan=True)


# Log-sigmoid-centred ------------------------------------------------------------------------------


def test_log_sigmoid_centred_by_hand():
    """A lead of ln 3 over the reference is 3/4, equality is 1/2."""
    reward, reference = rows([math.log(3) + 1, -2.0]), rows([1.0, -2.0])
    got = combine.centre_log_sigmoid(reward, known(reward), reference)
    assert_close(got, rows([math.log(3 / 4), math.log(1 / 2)]))


def test_its_sum_is_the_log_probability_that_all_are_good():
    reward, reference = torch.randn(5, 3, generator=seeded()), torch.zeros(5, 3)
    valid = torch.ones(5, 3, dtype=torch.bool)
    centred = combine.centre_log_sigmoid(reward, valid, reference)
    assert_close(centred.sum(1).exp(), reward.sigmoid().prod(1))


def test_no_invalid_reward_and_none_without_reference_gets_a_number():
    reward, valid = rows([1.0, 2.0, 3.0]), rows([True, False, True])
    got = combine.centre_log_sigmoid(reward, valid, rows([0.0, 0.0, NAN]))
    assert got.isfinite().tolist() == [[True, False, False]]


# Pareto -------------------------------------------------------------------------------------------


def dominated(reward, i, others):
    return any((reward[j] >= reward[i]).all() and (reward[j] > reward[i]).any() for j in others)


def test_the_pareto_mask_by_hand():
    """(2, 1) is dominated by (2, 3); equal rows keep each other; groups do not meet."""
    reward = rows([2.0, 1.0], [2.0, 3.0], [4.0, 0.0], [4.0, 0.0], [0.0, 0.0])
    group = torch.tensor([3, 3, 3, 3, 1])
    got = combine.pareto_mask(reward, known(reward), group, torch.ones(2))
    assert got.tolist() == [False, True, True, True, True]


@pytest.mark.parametrize("seed", range(5))
def test_the_pareto_mask_is_that_of_brute_force(seed):
    g = seeded(seed)
    reward = torch.randint(0, 4, (40, 3), generator=g).float()
    group = torch.randint(0, 3, (40,), generator=g)
    got = combine.pareto_mask(reward, known(reward), group, torch.ones(3))
    wanted = [not dominated(reward, i, (group == group[i]).nonzero()[:, 0]) for i in range(40)]
    assert got.tolist() == wanted
    assert 3 <= sum(wanted) < 40


def test_the_sign_of_a_weight_says_which_way_is_better_and_zero_leaves_out():
    reward = rows([1.0, 5.0, 9.0], [2.0, 3.0, 0.0])
    group = torch.zeros(2, dtype=torch.long)
    every = known(reward)
    assert combine.pareto_mask(reward, every, group, rows(1.0, -2.0, 0.0)).tolist() == [False, True]
    assert combine.pareto_mask(reward, every, group, rows(1.0, 1.0, 0.0)).tolist() == [True, True]


def test_a_sample_with_an_invalid_reward_is_out_and_dominates_nobody():
    reward = rows([1.0, 1.0], [9.0, 9.0], [9.0, NAN], [0.0, 0.0])
    valid = rows([True, True], [True, False], [True, False], [True, True])
    group = torch.zeros(4, dtype=torch.long)
    got = combine.pareto_mask(reward, valid, group, torch.ones(2))
    assert got.tolist() == [True, False, False, False]
    # A dimension of weight 0 may fail.
    got = combine.pareto_mask(reward, valid, group, rows(1.0, 0.0))
    assert got.tolist() == [False, True, True, False]


# Gaps ---------------------------------------------------------------------------------------------


def test_the_unit_range_by_hand():
    """Invalid 99 and -50 do not stretch it, one known value or equal ones are in the middle."""
    value = rows([1.0, 7.0], [99.0, 7.0], [3.0, 7.0], [5.0, NAN], [-50.0, 7.0], [6.0, 4.0])
    valid = rows([1, 1], [0, 1], [1, 1], [1, 0], [0, 1], [1, 1]).bool()
    got = pairing.unit_range(value, valid, torch.tensor([0, 0, 0, 0, 0, 1]))
    wanted = rows([0.0, 0.5], [NAN, 0.5], [0.5, 0.5], [1.0, NAN], [NAN, 0.5], [0.5, 0.5])
    assert_close(got, wanted, equal_nan=True)


def test_gap_weights_by_hand():
    """2^1 - 2^0 = 1; the same gap of 1/2 is worth more at the top; invalid has no weight."""
    got = pairing.gap_weights(rows(1.0, 0.5, 1.0, NAN), rows(0.0, 0.0, 0.5, 0.0))
    assert_close(got, rows(1.0, 2**0.5 - 1, 2 - 2**0.5, NAN), equal_nan=True)


# Lagrangian thresholds ----------------------------------------------------------------------------


def test_a_multiplier_falls_beyond_its_threshold_and_rises_below():
    """sigmoid: slope 1/4 at 0; rewards 2 above and 1 below; rate 0.1."""
    start = combine.Multipliers.start(rows(1.0, 1.0), "at_least")
    assert_close(start.weights, rows(0.5, 0.5))
    after = start.update(rows(3.0, 0.0))
    assert_close(after.raw, rows(-0.05, 0.025))
    assert_close(start.raw, torch.zeros(2))


def test_momentum_by_hand():
    """tanh: slope 1 at 0, then 1 - tanh(-.2)^2; excess 2, then 0."""
    first = combine.Multipliers.start(rows(1.0)).update(rows(3.0))
    assert_close(first.raw, rows(-0.2))
    second = first.update(rows(1.0), momentum=0.5)
    assert_close(second.raw, rows(-0.2 - 0.1 * 0.5 * 2.0))


def test_beyond_the_threshold_the_near_bound_pushes_back_and_at_least_does_not():
    near, least = (combine.Multipliers.start(rows(0.0), b) for b in ("near", "at_least"))
    for _ in range(100):
        near, least = near.update(rows(1.0)), least.update(rows(1.0))
    assert near.weights < -0.9
    assert 0 < least.weights < 0.2


def test_multipliers_find_the_weight_at_which_the_threshold_holds():
    """A policy with reward 2 w settles at 2 w = 1.2; the other dimension failed throughout."""
    state = combine.Multipliers.start(rows(1.2, 0.0))
    for _ in range(500):
        state = state.update(torch.stack([2 * state.weights[0], torch.tensor(NAN)]))
    assert_close(state.weights, rows(0.6, 0.0), atol=1e-3, rtol=0)


def test_their_update_is_the_gradient_of_the_dual():
    """d/d raw of sum phi(raw) (reward - threshold), taken by autograd."""
    reward, thresholds = rows(0.3, -1.0, 2.0), rows(1.0, -2.0, 2.5)
    for bound, phi in (("at_least", torch.sigmoid), ("near", torch.tanh)):
        raw = rows(0.5, -0.7, 1.1).requires_grad_()
        slope = torch.autograd.grad((phi(raw) * (reward - thresholds)).sum(), raw)[0]
        state = combine.Multipliers(thresholds, bound, raw.detach(), torch.zeros(3))
        assert_close(state.update(reward, rate=1.0).raw, raw.detach() - slope)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="base must be above 1"):
        pairing.gap_weights(torch.ones(1), torch.ones(1), base=1.0)


# The mean score over shifts of a sample: views, gradients, failures and cost ----------------------


class Corner(Rated):
    """Scores the red value of the upper left pixel; a dark one cannot be scored."""

    def __init__(self, needs=()):
        super().__init__(self.corner, "corner", ("red",), "dark", differentiable=True, needs=needs)

    def corner(self, batch):
        red = batch.media[:, 0, 0, 0, 0]
        return red.where(red > 0, math.nan)

    def judge_calls(self, group_sizes):
        return JudgeCalls(sum(group_sizes))


def numbered(height=3, width=4):
    """Return an image in which pixel (row, column) is row + column / 10 + 1."""
    rows = torch.arange(height)[:, None] + torch.arange(width) / 10 + 1
    return rows.expand(1, 1, 3, height, width).clone()


def test_the_nearest_shifts_come_first():
    assert list_shifts(1) == [(0, 0)]
    assert list_shifts(5) == [(0, 0), (-1, 0), (0, -1), (0, 1), (1, 0)]
    assert {max(map(abs, one)) for one in list_shifts(9)} == {0, 1}
    assert len(set(list_shifts(25))) == 25


def test_a_shift_moves_pixels_and_repeats_the_edge():
    image = numbered()
    moved = shift(image, 1, -2)[0, 0, 0]
    assert_close(moved, torch.tensor([[1.2, 1.3, 1.3, 1.3]] * 2 + [[2.2, 2.3, 2.3, 2.3]]))
    assert torch.equal(shift(image, 0, 0), image)


def test_the_score_is_the_mean_of_the_views():
    """The corner shows 1 (three times), 2 (moved up) and 1.1 (moved left)."""
    batch = MediaBatch(numbered(), ["a"])
    model = Shifted(Corner())
    assert model.spec.dims == ("red_shifted",)
    assert float(model.score(batch).values) == pytest.approx((1 + 2 + 1.1 + 1 + 1) / 5)
    farther = Shifted(Corner(), views=5, pixels=2)
    assert float(farther.score(batch).values) == pytest.approx((1 + 3 + 1.2 + 1 + 1) / 5)
    assert float(Shifted(Corner(), views=1).score(batch).values) == 1.0


def test_the_gradient_is_that_of_the_mean():
    media = numbered().requires_grad_()
    Shifted(Corner()).score(MediaBatch(media, ["a"])).values.sum().backward()
    expected = torch.zeros(3, 4)
    expected[0, 0], expected[1, 0], expected[0, 1] = 3 / 5, 1 / 5, 1 / 5
    assert_close(media.grad[0, 0, 0], expected)


def test_a_view_that_cannot_be_scored_fails_its_sample_only():
    media = numbered().repeat(2, 1, 1, 1, 1)
    media[1, :, :, 0, 1] = 0
    output = Shifted(Corner()).score(MediaBatch(media, ["a", "b"]))
    assert output.valid.tolist() == [[True], [False]]
    assert output.reasons == {1: "a view: dark"}


def test_independent_noise_shrinks():
    """Views are (0, 0), up, left and right, which repeats a pixel: weights 2, 1, 1 of 4."""
    media = torch.rand(4000, 1, 3, 3, 3, generator=torch.Generator().manual_seed(0)) + 0.1
    prompts = ["a"] * len(media)
    alone = Corner().score(MediaBatch(media, prompts)).values.var()
    mean = Shifted(Corner(), views=4).score(MediaBatch(media, prompts)).values.var()
    assert float(mean / alone) == pytest.approx((4 + 1 + 1) / 16, rel=0.1)


def test_calls_are_counted_and_comparing_rewards_are_refused():
    assert Shifted(Corner(), views=5).judge_calls([2, 3]).answers == 25
    with pytest.raises(ValueError, match="corner compares samples"):
        Shifted(Corner(needs=("groups",)))
    fingerprints = {Shifted(Corner(), *s).spec.fingerprint() for s in ((5, 1), (5, 2), (9, 1))}
    assert len(fingerprints) == 3


# Functions, methods and modules are rewards, with images and scores in the forms users have -------


@pytest.mark.parametrize(("form", "kind"), [("tensor", torch.Tensor), ("pil", list)])
def test_images_have_the_asked_form_without_an_annotation(form, kind):
    reward = CallableReward(lambda images: [isinstance(images, kind)], "form", form)
    assert reward.score(MediaBatch(torch.zeros(1, 1, 3, 2, 2), ["a"])).values.item() == 1.0


def takes_list(images: list):
    return [isinstance(images[0], Image.Image)] * len(images)


def takes_tensor(videos: torch.Tensor, colour, **columns):
    return [[*columns] == ["prompts"] and colour == ["red"] and videos.ndim == 5]


def test_the_annotation_decides_and_columns_arrive_by_name():
    batch = MediaBatch(torch.zeros(1, 1, 3, 2, 2), ["a"], [{"colour": "red"}])
    for one in (CallableReward(takes_list, images="tensor"), CallableReward(takes_tensor)):
        assert one.score(batch).values.item() == 1.0


@pytest.mark.parametrize("scores", [[1.0], "ab", 3.0, [1.0, "x"]])
def test_wrong_scores_name_the_reward(scores):
    reward = CallableReward(lambda images: scores, "mine")
    with pytest.raises(ValueError, match="reward mine returned"):
        reward.score(MediaBatch(torch.zeros(2, 1, 3, 2, 2), ["a", "b"]))


@pytest.mark.parametrize(
    "scores",
    [
        np.array([1.0, 0.5]),
        [np.float32(1), torch.tensor(0.5)],
        torch.tensor([[1.0], [0.5]]),
        (1, 0.5),
        [True, 0.5],
    ],
)
def test_scores_may_be_numbers_arrays_and_tensors(scores):
    output = CallableReward(lambda images: scores, "mine").score(_two())
    assert output.values.flatten().tolist() == [1.0, 0.5]


@pytest.mark.parametrize("failed", [None, math.nan])
def test_a_score_that_is_missing_ends_a_step_and_names_reward_and_sample(failed):
    rewards = Rewards([CallableReward(lambda images: [1.0, failed], "mine")], {"mine": 1.0})
    with pytest.raises(RewardFailure, match="sample 1: mine"):
        rewards.require(rewards.score(_two()), lambda i: f"sample {i}")


class _Scorer(torch.nn.Module):
    def forward(self, images, prompts):
        return images.mean((1, 2, 3))

    def bound(self, images):
        return [0.0] * len(images)


def test_modules_methods_and_closures_are_rewards():
    own = 0.0
    found = share_rewards([_Scorer(), _Scorer().bound, lambda images: [own] * len(images)])
    assert [one.score(_two()).values.sum().item() for one in found.values()] == [0.0] * 3
    assert [*found] == ["python:_Scorer", "python:bound", "python:<lambda>"]


def _two():
    return MediaBatch(torch.zeros(2, 1, 3, 2, 2), ["a", "b"])
