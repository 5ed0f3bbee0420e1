"""The online loop on one-pixel images learns exactly the learnable part of the reward."""

import math
from dataclasses import dataclass, replace

import pytest
import torch

from flowalign.functional.surrogate import gaussian_kl
from flowalign.functional.transition import Gaussian, log_density
from flowalign.losses.policy_gradient.grpo import (
    GRPO,
    DivergenceMask,
    LogHinge,
    PPOClip,
    RatioNorm,
    RewardClip,
)
from flowalign.rewards import RewardFailure, Rewards
from flowalign.sampling import Comb, Fixed, Tree
from flowalign.training.learner import Optimizer
from flowalign.training.policy_gradient.batches import minibatches
from flowalign.training.policy_gradient.policy_gradient_loop import update
from flowalign.training.policy_gradient.step_gradients import MeasuredWeight
from flowalign.training.reference import EMA
from flowalign.types import (
    CreditEstimator,
    MediaBatch,
    PolicyLoss,
    RewardModel,
    RewardOutput,
    RewardSpec,
    StepCredit,
    step_of,
)
from flowalign.types.trajectory import prompt_step_ids
from flowalign.utils.costs import Costs
from flowalign.utils.errors import TrainingFailure
from tests.fixtures.credited import judged
from tests.fixtures.pixel import PixelPolicy, Redness
from tests.fixtures.training import PROMPTS, flat, new_learner, new_recipe, new_rewards, rise, train

THREE = ["a", "bb", "ccc"]


class Told(RewardModel):
    """Returns the numbers it was told, a row per sample; NaN and infinity are its failures."""

    def __init__(self, *rows, dims=("told",)):
        self.values = torch.tensor(
            [[float(v) for v in (r if isinstance(r, tuple) else (r,))] for r in rows]
        )
        self.spec = RewardSpec("told", dims, "image", (-math.inf, math.inf), "Apache-2.0")

    def score(self, batch: MediaBatch) -> RewardOutput:
        return RewardOutput.build(self.spec, self.values[: len(batch.prompts)])


@dataclass
class Spy(PolicyLoss):
    """Pulls every mean down a little, and remembers the minibatches that it was given."""

    clip = 0.2

    def __post_init__(self):
        self.seen = []

    def loss(self, fields, batch):
        self.seen.append(batch)
        return fields.transition(fields.policy, batch).mean.mean(), {}


@dataclass(frozen=True)
class Rising(CreditEstimator):
    """Step k earns (k + 1) times the outcome, so steps can be distinguished."""

    def __call__(self, trajectory, values):
        final = values([trajectory.num_steps])
        factor = torch.arange(1.0, trajectory.num_steps + 1)[None, :, None]
        return StepCredit(final * factor, prompt_step_ids(trajectory), trajectory.eta > 0)


REWARD_CLIP = RewardClip(low=0.05, clip=0.2, sensitivity=1.0)
SURROGATES = [
    PPOClip(0.2),
    RatioNorm(0.2),
    LogHinge(0.2),
    DivergenceMask(0.05),
    REWARD_CLIP,
]


@pytest.mark.parametrize("surrogate", SURROGATES, ids=lambda s: type(s).__name__)
@pytest.mark.slow
def test_every_surrogate_raises_a_reward_that_can_be_learned(surrogate):
    cfg = new_recipe(
        {"samples_per_prompt": 8}, algorithm=GRPO(surrogate, kl_coef=1e-3), epochs_per_step=2
    )
    metrics = train(cfg, new_learner(learning_rate=3e-2), steps=12)
    assert rise(metrics) > 0.3
    assert all(math.isfinite(v) for m in metrics for v in m.values())


def test_gradient_squares_of_auxiliary_terms_are_those_of_autograd():
    learner = new_learner(PixelPolicy(seed=2))
    reference = PixelPolicy(seed=3)
    anchored = GRPO(PPOClip(0.2), kl_coef=0.5, kl="gaussian")
    batch, _ = judged(replace(new_recipe(), algorithm=anchored), learner)
    part = list(minibatches(batch, torch.arange(12), 100))[1]
    fields = batch.fields(learner.policy, reference)
    _, stats = anchored.loss(fields, part)
    current = fields.transition(learner.policy, part)
    mean, std = current.mean.detach().requires_grad_(), current.std
    with torch.no_grad():
        frozen = fields.transition(reference, part)
    terms = {
        "kl": 0.5 * gaussian_kl(Gaussian(mean, std), frozen).mean(),
        "policy": anchored.surrogate(
            log_density(fields.kernel, part["x_next"], Gaussian(mean, std)) - part["logp_old"],
            Gaussian(mean, std),
            part,
        )[0].mean(),
    }
    for name, term in terms.items():
        (expected,) = torch.autograd.grad(term, mean, retain_graph=True)
        torch.testing.assert_close(
            stats[f"gradient_square/{name}"], len(mean) * expected.square().sum()
        )
        assert expected.norm() > 0


@pytest.mark.parametrize(("coef", "warns"), [(1e-3, False), (1e4, True)])
def test_an_auxiliary_term_that_drowns_the_policy_term_is_warned_of_once(coef, warns):
    said: list[str] = []
    cfg = new_recipe(algorithm=GRPO(PPOClip(0.2), kl_coef=coef))
    learner = new_learner(PixelPolicy(seed=2))
    learner.fields["reference"] = PixelPolicy(seed=3)
    metrics = train(cfg, learner, steps=3, log=said.append)
    assert all("gradient_ratio/kl" in row for row in metrics)
    assert not any(name.startswith("gradient_square/") for row in metrics for name in row)
    warned = [text for text in said if "auxiliary term kl" in text]
    assert len(warned) == int(warns)
    assert (metrics[0]["gradient_ratio/kl"] > 3) == warns


def test_reward_clip_lets_the_best_move_further():
    learner = new_learner()
    batch, _ = judged(new_recipe(), learner)
    part = next(minibatches(batch, torch.arange(12), 100))
    part = part.with_columns(logp_old=part["logp_old"] - 0.1)  # all ratios are e^.1
    best, middling = float(part["advantage"].max()), 0.1
    part = part.with_columns(advantage=torch.tensor([best, middling] * 6))
    surrogate = RewardClip(low=0.05, clip=0.3, sensitivity=1.0)
    fields = batch.fields(learner.policy, learner.policy)
    current = fields.transition(learner.policy, part)
    log_ratio = log_density(fields.kernel, part["x_next"], current) - part["logp_old"]
    loss, _ = surrogate(log_ratio, current, part)
    ratios = torch.tensor([math.exp(0.1), 1.05 + 0.25 * math.tanh(0.1)])
    free, bound = torch.tensor([best, middling]) * ratios
    torch.testing.assert_close(loss, -torch.stack([free, bound]).repeat(6), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: RewardClip(low=0.2, clip=0.1, sensitivity=1.0), "low 0.2"),
        (lambda: RewardClip(low=0.1, clip=0.2, sensitivity=0.0), "sensitivity 0"),
    ],
)
def test_surrogates_that_make_no_sense_are_refused(made, said):
    with pytest.raises(ValueError, match=said):
        made()


def test_a_negative_weight_lowers_the_reward():
    rewards = new_rewards(redness=-1.0)
    learner = new_learner(learning_rate=3e-2)
    metrics = train(new_recipe({"samples_per_prompt": 8}), learner, rewards, steps=12)
    assert metrics[-1]["reward/redness"] < metrics[0]["reward/redness"] - 0.2


def test_each_update_is_the_gradient_of_the_mean_over_all_trained_transitions():
    learner, cfg = new_learner(), new_recipe(micro_batch=5, step_weight="std")
    batch, _ = judged(cfg, learner)
    everything = list(minibatches(batch, torch.arange(12), 100))
    losses = []
    for b in everything:
        fields = batch.fields(learner.policy, learner.policy)
        logp = log_density(fields.kernel, b["x_next"], fields.transition(learner.policy, b))
        losses.append(-b["weight"] * (logp - b["logp_old"]).exp() * b["advantage"])
    wanted = torch.autograd.grad(torch.cat(losses).mean(), learner.parameters)
    got = []
    learner.step = lambda: got.extend(p.grad.clone() for p in learner.parameters) or {}
    update(cfg, learner, batch, 0, 0)
    assert len(torch.cat(losses)) == 36
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("micro_batch", [1, 5])
def test_the_size_of_a_micro_batch_changes_no_update(micro_batch):
    whole, parts = new_learner(), new_learner()
    train(new_recipe(micro_batch=64), whole, steps=3)
    train(new_recipe(micro_batch=micro_batch), parts, steps=3)
    torch.testing.assert_close(
        flat(whole.policy.denoiser), flat(parts.policy.denoiser), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize(("updates", "epochs"), [(1, 1), (3, 1), (1, 2), (2, 3)])
def test_a_step_makes_updates_times_epochs_and_shows_each_transition_once_an_epoch(updates, epochs):
    spy, learner = Spy(), new_learner()
    cfg = new_recipe(algorithm=spy, updates_per_step=updates, epochs_per_step=epochs, micro_batch=5)
    train(cfg, learner, steps=2)
    assert learner.num_updates == 2 * updates * epochs
    rows = torch.cat([b["x_next"] for b in spy.seen])
    assert len(rows) == 2 * 12 * 3 * epochs
    assert rows.unique(dim=0, return_counts=True)[1].unique().tolist() == [epochs]


def test_parts_of_a_step_are_of_other_samples_each_epoch():
    spy = Spy()
    train(new_recipe(algorithm=spy, updates_per_step=2, epochs_per_step=2), new_learner())
    parts = [{tuple(x.tolist()) for b in spy.seen[i : i + 3] for x in b["x"]} for i in (0, 3, 6, 9)]
    assert parts[0].isdisjoint(parts[1])
    assert parts[0] | parts[1] == parts[2] | parts[3]
    assert parts[0] not in (parts[2], parts[3])


def test_step_weights_reach_the_loss():
    """std of Flow-SDE at sigma 1, .75, .5 and eta .8: g sqrt(dt), scaled to mean 1."""
    spy = Spy()
    train(new_recipe(algorithm=spy, step_weight="std"), new_learner())
    g = [0.8 * math.sqrt(s / (1 - min(s, 0.75))) for s in (1.0, 0.75, 0.5)]
    std = [x * math.sqrt(0.25) for x in g]
    for batch in spy.seen:
        wanted = std[step_of(batch)] / (sum(std) / 3)
        torch.testing.assert_close(batch["weight"], torch.full((12,), wanted))
    assert [step_of(b) for b in spy.seen] == [0, 1, 2]


def test_weights_scale_the_policy_term_and_not_the_kl():
    learner, cfg = new_learner(PixelPolicy(seed=2)), new_recipe()
    batch, _ = judged(cfg, learner)
    first = next(minibatches(batch, torch.arange(12), 100))
    heavy = first.with_columns(weight=3 * first["weight"])
    plain, with_kl = GRPO(PPOClip(0.2)), GRPO(PPOClip(0.2), kl_coef=0.5)
    other = PixelPolicy(seed=5)
    fields = batch.fields(other, learner.reference)
    single, triple = (plain.loss(fields, b)[0] for b in (first, heavy))
    torch.testing.assert_close(triple, 3 * single)
    kl = with_kl.loss(fields, first)[0] - single
    torch.testing.assert_close(with_kl.loss(fields, heavy)[0] - triple, kl)
    assert kl > 1e-4


REWARDS = [0.0, 1.0, 2.0, 5.0, 3.0, 3.0, 7.0, 4.0, -1.0, 0.5, 0.0, 9.0]


def _std(values):
    return float(torch.tensor(values).std(correction=0))


@pytest.mark.parametrize("scale", ["group", "batch", "joint", "none"])
def test_advantages_by_hand(scale):
    """Credit is (k + 1) r: a group compares equal steps, "joint" all steps of a prompt."""
    cfg = new_recipe(credit=Rising(), advantages={"scale": scale, "clip": 100.0})
    batch, _ = judged(cfg, rewards=Rewards([Told(*REWARDS)], {"told": 2.0}))
    every = [(k + 1) * r for r in REWARDS for k in range(3)]
    for b in range(12):
        group = REWARDS[b // 4 * 4 : b // 4 * 4 + 4]
        for k in range(3):
            same = [(k + 1) * r for r in group]
            if scale == "joint":
                same = [(j + 1) * r for r in group for j in range(3)]
            spread = {"none": 1 - 1e-4, "batch": _std(every)}.get(scale, _std(same))
            wanted = 2 * ((k + 1) * REWARDS[b] - sum(same) / len(same)) / (spread + 1e-4)
            assert float(batch.advantage[b, k]) == pytest.approx(wanted, rel=1e-4, abs=1e-5)
        assert batch.advantage[b, 3] == 0  # the last step is not trained


def test_advantages_are_clipped():
    rewards = Rewards([Told(*REWARDS)], {"told": 1.0})
    batch, _ = judged(new_recipe(advantages={"clip": 0.5}), rewards=rewards)
    assert batch.advantage.abs().max() == 0.5
    assert batch.advantage.unique().numel() > 3


def test_dimensions_are_weighted_after_or_before_they_are_normalised():
    rows = [(r, 100 * q) for r, q in zip(REWARDS, reversed(REWARDS), strict=True)]
    model = Told(*rows, dims=("small", "large"))
    rewards = Rewards([model], {"small": 1.0, "large": 0.5})
    after, _ = judged(new_recipe(), rewards=rewards)
    before, _ = judged(new_recipe(advantages={"combine": "advantage_of_sum"}), rewards=rewards)
    group = torch.tensor(rows)[:4]
    normed = (group - group.mean(0)) / (group.std(0, correction=0) + 1e-4)
    torch.testing.assert_close(
        after.advantage[:4, 0], normed @ rewards.weights, rtol=1e-4, atol=1e-4
    )
    total = group @ rewards.weights
    wanted = (total - total.mean()) / (total.std(correction=0) + 1e-4)
    torch.testing.assert_close(before.advantage[:4, 0], wanted, rtol=1e-4, atol=1e-4)


def test_groups_of_equal_rewards_teach_nothing():
    flat_second = [*REWARDS[:4], 3.0, 3.0, 3.0, 3.0, *REWARDS[8:]]
    batch, metrics = judged(new_recipe(), rewards=Rewards([Told(*flat_second)], {"told": 1.0}))
    assert batch.advantage[4:8].abs().max() == 0
    assert (batch.advantage[:4, :3] != 0).sum() == 9  # one of the four is the mean
    assert metrics["zero_std_ratio"] == pytest.approx(1 / 3)


def test_a_step_of_equal_rewards_moves_no_weight():
    learner = new_learner()
    before = flat(learner.policy.denoiser)
    rewards = Rewards([Told(*[0.7] * 12)], {"told": 1.0})
    metrics = train(new_recipe(on_failed_check="warn"), learner, rewards, steps=2)
    assert metrics[0]["zero_std_ratio"] == 1
    assert metrics[0]["adv_abs_mean"] == 0
    assert torch.equal(flat(learner.policy.denoiser), before)


def test_the_first_update_of_a_step_sees_ratios_of_one():
    metrics = train(new_recipe(), new_learner(), steps=3)
    for m in metrics:
        assert m["ratio_mean"] == pytest.approx(1, abs=1e-5)
        assert m["ratio_std"] < 1e-5
    later = train(new_recipe(epochs_per_step=3), new_learner(), steps=1)
    assert later[0]["ratio_std"] > 1e-4


# Failure is never a number.

FAILED = [math.nan if i in (5, 9) else r for i, r in enumerate(REWARDS)]


def test_a_failed_reward_stops_the_run_naming_sample_prompt_and_reason():
    with pytest.raises(RewardFailure) as caught:
        train(new_recipe(), new_learner(), Rewards([Redness(fail_on="b")], {"redness": 1.0}))
    message = str(caught.value)
    assert len(message.splitlines()) <= 5
    assert "'bb'" in message
    assert "told to" in message
    assert "4 of 12 rewards failed" in message
    assert "drop_sample" in message


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_model_that_returns_no_finite_number_has_failed(bad):
    values = [*REWARDS[:7], bad, *REWARDS[8:]]
    with pytest.raises(RewardFailure, match=r"sample 7.*told returned a non-finite value for told"):
        judged(new_recipe(), rewards=Rewards([Told(*values)], {"told": 1.0}))


@pytest.mark.parametrize(
    ("on_failure", "trained"), [("drop_sample", {4, 6, 7, 8, 10, 11}), ("drop_group", set())]
)
def test_failed_samples_or_their_groups_are_left_out(on_failure, trained):
    rewards = Rewards([Told(*FAILED)], {"told": 1.0}, on_failure)
    batch, metrics = judged(new_recipe(on_failed_reward=on_failure), rewards=rewards)
    kept = {0, 1, 2, 3} | trained
    assert set(batch.mask[:, 0].nonzero().flatten().tolist()) == kept
    assert batch.advantage.isfinite().all()
    assert batch.advantage[[5, 9]].abs().max() == 0
    assert metrics["transitions"] == 3 * len(kept)
    assert metrics["reward_invalid"] == pytest.approx(2 / 12)
    fine = [r for r in FAILED if not math.isnan(r)]
    assert metrics["reward/told"] == pytest.approx(sum(fine) / 10)
    assert metrics["reward_mean"] == pytest.approx(sum(fine) / 10)
    if on_failure == "drop_sample":
        rest = torch.tensor([REWARDS[i] for i in (4, 6, 7)])
        wanted = (rest - rest.mean()) / (rest.std(correction=0) + 1e-4)
        torch.testing.assert_close(batch.advantage[[4, 6, 7], 0], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("on_failure", ["drop_sample", "drop_group"])
def test_dropping_trains_on_what_is_left_as_if_the_rest_had_not_been_drawn(on_failure):
    """Two prompts fail completely: the weights equal those of a run with the other prompt only."""
    spoilt, alone = new_learner(), new_learner()
    values = [*REWARDS[:4], *[math.nan] * 8]
    rewards = Rewards([Told(*values)], {"told": 1.0}, on_failure)
    batch, _ = judged(new_recipe(on_failed_reward=on_failure), spoilt, rewards)
    update(new_recipe(), spoilt, batch, 0, 0)
    cfg = new_recipe(prompts_per_step=1)
    only, _ = judged(cfg, alone, Rewards([Told(*REWARDS[:4])], {"told": 1.0}), THREE[:1])
    update(cfg, alone, only, 0, 0)
    torch.testing.assert_close(
        flat(spoilt.policy.denoiser), flat(alone.policy.denoiser), atol=1e-6, rtol=1e-5
    )


def test_a_step_where_every_reward_failed_changes_nothing_and_says_so():
    learner = new_learner()
    before = flat(learner.policy.denoiser)
    rewards = Rewards([Told(*[math.nan] * 12)], {"told": 1.0}, "drop_sample")
    metrics = train(new_recipe(on_failed_reward="drop_sample"), learner, rewards, steps=2)
    assert torch.equal(flat(learner.policy.denoiser), before)
    assert metrics[0]["reward_invalid"] == 1
    assert math.isnan(metrics[0]["reward_mean"])
    assert metrics[0]["transitions"] == 0
    assert learner.num_updates == 0


def test_a_dimension_of_weight_zero_may_fail():
    rows = [(r, math.nan if i < 6 else 1.0) for i, r in enumerate(REWARDS)]
    model = Told(*rows, dims=("told", "logged"))
    batch, metrics = judged(new_recipe(), rewards=Rewards([model], {"told": 1.0}))
    clean, _ = judged(new_recipe(), rewards=Rewards([Told(*REWARDS)], {"told": 1.0}))
    assert torch.equal(batch.advantage, clean.advantage)
    assert metrics["reward/logged"] == 1
    assert metrics["reward_invalid"] == 0


def test_several_reward_models_stand_side_by_side_with_joined_reasons():
    first, second = Told(1.0, math.nan, math.nan), Redness(fail_on="ccc")
    rewards = Rewards([first, second], {"told": 1.0}, "drop_sample", Costs())
    output = rewards.score(MediaBatch(torch.zeros(3, 1, 3, 1, 1), ["a", "bb", "ccc"]))
    assert rewards.dims == ("told", "redness", "green")
    assert output.valid.tolist() == [[True] * 3, [False, True, True], [False] * 3]
    assert set(output.reasons) == {1, 2}
    assert "told returned" in output.reasons[2]
    assert "told to" in output.reasons[2]
    assert rewards.costs.reward_calls == 6


@pytest.mark.parametrize(
    ("models", "weights", "said"),
    [
        ([Redness()], {"redness": 0.0}, "other than 0"),
        ([Redness()], {"rednes": 1.0}, "rednes"),
        ([Redness(), Redness()], {"redness": 1.0}, "more than one model"),
        ([], {"redness": 1.0}, "empty"),
        ([Redness()], {"redness": math.inf}, "finite"),
    ],
)
def test_reward_weights_that_optimise_nothing_are_refused(models, weights, said):
    with pytest.raises(ValueError, match=said):
        Rewards(models, weights).check_weights()


def test_a_reward_of_the_wrong_shape_is_refused_by_name():
    spec = RewardSpec("told", ("one", "two"), "image", (0.0, 1.0), "Apache-2.0")
    with pytest.raises(ValueError, match=r"'told' returned shape \(3, 1\), expected \(n, 2\)"):
        RewardOutput.build(spec, torch.zeros(3, 1))


# Guards around an update.


class Exploding(GRPO):
    """Its gradient is not finite in the updates given."""

    def __init__(self, *updates, factor=math.inf):
        super().__init__(PPOClip(0.2))
        self.updates, self.factor, self.count = updates, factor, -1

    def loss(self, fields, batch):
        self.count += 1
        loss, stats = super().loss(fields, batch)
        return loss * (self.factor if self.count // 3 in self.updates else 1.0), stats


@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_skipped_and_counted(factor):
    learner = new_learner(ema=(0.5, 1))
    weights, averages = [], []
    step = learner.step

    def watched():
        metrics = step()
        weights.append(flat(learner.policy.denoiser))
        averages.append(torch.cat([a.flatten() for a in learner.ema.average]))
        return metrics

    learner.step = watched
    metrics = train(new_recipe(algorithm=Exploding(1, 2, factor=factor)), learner, steps=4)
    assert torch.equal(weights[1], weights[0])
    assert torch.equal(weights[2], weights[0])
    assert not torch.equal(weights[3], weights[2])
    assert torch.equal(averages[2], averages[0])
    assert [m["optim/skipped"] for m in metrics] == [0, 1, 2, 2]
    assert learner.num_updates == 4
    assert learner.ema.num_updates == 2
    assert not math.isfinite(metrics[1]["optim/grad_norm"])


def test_a_run_stops_when_too_many_updates_in_a_row_are_skipped():
    learner = new_learner(max_skipped=2)
    with pytest.raises(TrainingFailure, match="3 updates in a row") as caught:
        train(new_recipe(algorithm=Exploding(1, 2, 3)), learner, steps=6)
    assert len(str(caught.value).splitlines()) <= 5
    assert "max_skipped is 2" in str(caught.value)
    assert flat(learner.policy.denoiser).isfinite().all()
    survivor = new_learner(max_skipped=2)
    train(new_recipe(algorithm=Exploding(1, 2, 4, 5)), survivor, steps=7)
    assert survivor.num_skipped == 4


def test_the_gradient_is_clipped_to_its_norm():
    norms = []
    learner = new_learner(max_grad_norm=1e-3)
    optimize = learner.optimizer.step
    learner.optimizer.step = lambda *a, **k: (
        norms.append(float(torch.cat([p.grad.flatten() for p in learner.parameters]).norm())),
        optimize(*a, **k),
    )
    metrics = train(new_recipe(), learner)
    assert metrics[0]["optim/grad_norm"] > 1e-2
    assert norms == [pytest.approx(1e-3, rel=1e-3)]


def test_ema_by_hand():
    """decay is min(.6, (1 + n) / (10 + n)): 1/10, 2/11, 3/12; every second update."""
    p = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    ema = EMA([p], 0.6, every=2)
    wanted = p.detach().clone()
    for update_, decay in ((1, None), (2, 1 / 10), (3, None), (4, 2 / 11), (5, None), (6, 3 / 12)):
        with torch.no_grad():
            p.add_(torch.tensor([1.0, 0.5]) * update_)
        ema.update(update_)
        if decay is not None:
            wanted = decay * wanted + (1 - decay) * p.detach()
        torch.testing.assert_close(ema.average[0], wanted)
    for n in range(200):
        ema.update(2 * n)
    torch.testing.assert_close(ema.average[0], p.detach())


def test_ema_decay_never_exceeds_what_was_asked():
    p = torch.nn.Parameter(torch.zeros(1))
    ema = EMA([p], 0.3)
    ema.num_updates = 1000
    with torch.no_grad():
        p.fill_(1.0)
    ema.update(1)
    assert float(ema.average[0]) == pytest.approx(0.7)


def test_weights_are_the_average_inside_applied_and_themselves_afterwards():
    p = torch.nn.Parameter(torch.tensor([4.0]))
    ema = EMA([p], 0.5)
    with torch.no_grad():
        p.fill_(6.0)
    with pytest.raises(RuntimeError, match="inside"), ema.applied():  # noqa: PT012
        assert p.item() == 4
        raise RuntimeError("inside")
    assert p.item() == 6


@pytest.mark.parametrize(("decay", "every"), [(1.0, 1), (-0.1, 1), (0.5, 0)])
def test_an_average_that_averages_nothing_is_refused(decay, every):
    with pytest.raises(ValueError, match="decay"):
        EMA([], decay, every)


RATES = {
    ("constant", 0): [8, 8, 8, 8],
    ("constant", 2): [4, 8, 8, 8],
    ("linear", 0): [8, 6, 4, 2],
    ("linear", 4): [2, 3, 3, 2],
    ("cosine", 0): [8, 4 + 4 * math.cos(math.pi / 4), 4, 4 - 4 * math.cos(math.pi / 4)],
}


@pytest.mark.parametrize(("kind", "rates"), RATES.items(), ids=str)
def test_the_learning_rate_follows_its_schedule(kind, rates):
    decay, warmup = kind
    learner = new_learner(total=4, learning_rate=8e-3, decay=decay, warmup=warmup)
    metrics = train(new_recipe(), learner, steps=4)
    assert [m["optim/learning_rate"] for m in metrics] == [pytest.approx(r * 1e-3) for r in rates]
    assert learner.optimizer.param_groups[0]["lr"] == pytest.approx(rates[-1] * 1e-3)
    assert Optimizer(learning_rate=1.0, decay=decay).rate(9, 4) >= 0


def test_pooled_credit_is_compared_over_all_prompts_at_the_same_step():
    """Prompts of one sample each, which no narrower comparison could train."""
    cfg = new_recipe({"samples_per_prompt": 1}, advantages={"scale": "pooled"})
    learner, seen = new_learner(PixelPolicy(seed=4)), []
    batch, _ = judged(cfg, learner, prompts=PROMPTS[:4], observe=seen.append)
    outcome = seen[0].values([4])[:, 0, 0]
    wanted = (outcome - outcome.mean()) / (outcome.std(correction=0) + 1e-4)
    for k in range(3):
        torch.testing.assert_close(batch.advantage[:, k], wanted)
    assert wanted.abs().min() > 0.01


ALONE = {"samples_per_prompt": 1}
TREE = {"samples_per_prompt": 8, "branching": Tree(splits=[0, 1, 2])}
COMB = {"samples_per_prompt": 6, "branching": Comb(children=2)}
MEASURED = {"step_weight": "measured"}
CHUNKS = {"algorithm": GRPO(PPOClip(0.2), chunk_sizes=[2])}
REFUSED = [
    ({"prompts_per_step": 0}, "recipe.prompts_per_step is 0"),
    ({"updates_per_step": 0}, "recipe.updates_per_step is 0"),
    ({"epochs_per_step": 0}, "recipe.epochs_per_step is 0"),
    ({"micro_batch": 0}, "recipe.micro_batch is 0"),
    ({"sampling": {"sde_window": Fixed(2, 7)}}, r"\[2, 7\)"),
    ({"sampling": {"merge": 2.2}}, "the window has 3"),
    ({"sampling": ALONE, "advantages": {"scale": "group"}}, "advantages.scale pooled"),
    ({"sampling": ALONE, "advantages": {"scale": "none"}}, "samples_per_prompt is 1"),
    ({"advantages": {"scale": "none", "std_correction": 1}}, "is 1, but scale none"),
    ({"advantages": {"scale": "given", "std_correction": 1}}, "is 1, but scale given"),
    ({"advantages": {"extremes": 3}}, r"extremes is 3: .* more than the 4 samples"),
    ({"sampling": TREE, **CHUNKS}, "same stochastic steps in every sample"),
    ({"sampling": COMB, **CHUNKS}, "same stochastic steps in every sample"),
    ({"prompts_per_step": 1, **MEASURED}, "raise prompts_per_step to at least 2"),
    ({"updates_per_step": 2, **MEASURED}, "raise prompts_per_step to at least 4"),
    ({"step_weight": MeasuredWeight(start=[1.0, 2.0])}, r"step_weight\.start is \[1\.0, 2"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_recipes_that_cannot_run_are_refused_before_anything_runs(settings, message):
    with pytest.raises(ValueError, match=message):
        new_recipe(**settings)
