"""Rewards in the loop: scored in parallel with sampling, by groups, transformed, and bounded."""

import math
import threading
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from flowalign.credit.chain import Gain
from flowalign.data.requests import read_requests
from flowalign.rewards.checked import RewardError
from flowalign.rewards.combine import Multipliers
from flowalign.rewards.composite import Rewards
from flowalign.rewards.objectives import LogSigmoidCentred, Thresholds, TransformedValues
from flowalign.training.checkpoint import restore, save
from flowalign.training.rollouts.advantages import not_dominated
from flowalign.training.rollouts.collecting import collect_rollouts, completion_values, rollout
from flowalign.types import (
    Loadable,
    MediaBatch,
    PastOutcomes,
    Request,
    RewardModel,
    RewardOutput,
    RewardSpec,
    plain_requests,
)
from tests.fixtures.credited import Given, credited
from tests.fixtures.pixel import Redness
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


class Rank(RewardModel):
    """The share of its group that a sample is redder than."""

    def __init__(self):
        self.spec = RewardSpec(
            "rank", ("rank",), "any", (0.0, 1.0), "Apache-2.0", needs=("groups",)
        )
        self.groups = []

    def score(self, batch):
        self.spec.screen(batch)
        self.groups.append(list(batch.groups))
        red, group = batch.media[:, 0, 0, 0, 0], torch.tensor(list(batch.groups))
        same = group[:, None] == group
        wins = ((red[:, None] > red) & same).sum(1) / (same.sum(1) - 1).clamp(min=1)
        return RewardOutput.build(self.spec, wins[:, None])


@pytest.mark.slow
@pytest.mark.parametrize("credit", [None, Gain()], ids=["outcome", "gain"])
@pytest.mark.parametrize("at_once", [1, 2, 3, 7])
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


def test_a_models_error_reaches_the_caller():
    class Broken(Redness):
        def score(self, batch):
            raise ValueError("no")

    with pytest.raises(RewardError, match=r"redness.*ValueError: no "):
        Rewards([Broken()], {"redness": 1.0}).score(MediaBatch(torch.rand(1, 1, 3, 2, 2), ["a"]))


@pytest.mark.parametrize("micro_batch", [3, 64])
def test_groupwise_models_see_whole_groups_whatever_the_chunks(micro_batch):
    model, learner = Rank(), new_learner()
    cfg = new_recipe({"micro_batch": micro_batch})
    rewards = Rewards([Redness(), model], {"rank": 1.0})
    trajectory = rollout(cfg.rollouts, learner, plain_requests(THREE), 0, 0)
    values = completion_values(cfg.rollouts, learner, rewards, trajectory)([4])[:, 0]
    assert len(model.groups) == 1
    assert [len(set(model.groups[0][i : i + 4])) for i in (0, 4, 8)] == [1, 1, 1]
    assert len(set(model.groups[0])) == 3
    red = learner.policy.decode(trajectory.state(4))[:, 0, 0, 0, 0].view(3, 4)
    wanted = (red[:, :, None] > red[:, None]).sum(2).flatten() / 3
    assert_close(values[:, 2], wanted)


def test_states_of_different_steps_are_different_groups():
    model, learner = Rank(), new_learner()
    cfg = new_recipe(credit=Gain())
    trajectory = rollout(cfg.rollouts, learner, plain_requests(THREE), 0, 0)
    completion_values(cfg.rollouts, learner, Rewards([model], {"rank": 1.0}), trajectory)([1, 4])
    assert len(set(model.groups[0])) == 6


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


def test_loading_prepares_exactly_the_models_that_need_it():
    class Heavy(Redness, Loadable):
        loaded = 0

        def load(self):
            self.loaded += 1

    heavy = Heavy()
    heavy.spec = RewardSpec("heavy", ("heavy", "too"), "any", (0.0, 1.0), "Apache-2.0")
    Rewards([Redness(), heavy], {"redness": 1.0}).load()
    assert heavy.loaded == 1


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
    with pytest.raises(ValueError, match=r"names green; it needs a number, .*for each of redness"):
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
    with pytest.raises(ValueError, match="names redness, redness; it needs"):
        both.check(new_rewards())
    rows = [("p:1", Request("a", metadata={"usual": 2})), ("p:2", Request("b"))]
    with pytest.raises(ValueError, match=r"p:2: usual is None; .* the reward redness"):
        transform.check_requests(rows)
    for nonsense in (math.nan, True, "high"):
        with pytest.raises(ValueError, match=r"p:1: usual is"):
            transform.check_requests([("p:1", Request("a", metadata={"usual": nonsense}))])


def test_transformed_rewards_are_learned_from_and_raw_ones_reported():
    learner, cfg = new_learner(), new_recipe(advantages={"scale": "none"})
    reference = LogSigmoidCentred(reference={"redness": -5.0})
    trajectory = rollout(cfg.rollouts, learner, plain_requests(THREE), 0, 0)
    plain, raw = credited(
        cfg, learner, completion_values(cfg.rollouts, learner, new_rewards(), trajectory)
    )
    cfg = new_recipe(advantages={"scale": "none", "value_transform": reference})
    moved, same = credited(
        cfg, learner, completion_values(cfg.rollouts, learner, new_rewards(), trajectory)
    )
    assert raw["reward/redness"] == same["reward/redness"]
    ratio = moved.advantage.abs().sum() / plain.advantage.abs().sum()
    assert 0.003 < ratio < 0.01, "far above the reference, log sigmoid is nearly flat: e^-5"


def test_dominated_samples_are_not_trained_and_the_baseline_is_everyones():
    learner = new_learner()
    trajectory = rollout(new_recipe().rollouts, learner, plain_requests(THREE), 0, 0)
    rewards = new_rewards(redness=1.0, green=1.0)
    everyone, _ = credited(
        new_recipe(),
        learner,
        completion_values(new_recipe().rollouts, learner, rewards, trajectory),
    )
    cfg = new_recipe(advantages={"pareto": "group"})
    some, metrics = credited(
        cfg, learner, completion_values(cfg.rollouts, learner, rewards, trajectory)
    )
    final = completion_values(cfg.rollouts, learner, rewards, trajectory)([4])[:, 0].view(3, 4, 2)
    above = (final[:, :, None] >= final[:, None]).all(3) & (final[:, :, None] > final[:, None]).any(
        3
    )
    keep = ~above.any(1).flatten()
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
        rewards, cfg = (
            new_rewards(),
            new_recipe(advantages={"thresholds": Thresholds(at={"redness": at})}),
        )
        weights = [m["weight/redness"] for m in train(cfg, new_learner(), rewards, steps=3)]
        assert weights[0] == 0.5
        assert (weights[2] > weights[1] > weights[0]) == rises


def test_thresholds_refuse_unweighted_dimensions():
    with pytest.raises(ValueError, match="thresholds name green; weighted dimensions are redness"):
        new_recipe(
            advantages={"thresholds": Thresholds(at={"green": 1.0})}
        ).advantages.check_rewards(new_rewards())
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
