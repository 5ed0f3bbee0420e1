"""The probe's gradients are those of the update, step by step, and no weight moves."""

import math
from dataclasses import replace

import pytest
import torch

from flowalign.cli.probe import format_credit
from flowalign.credit import Critic, LambdaReturn
from flowalign.data.requests import Requests
from flowalign.functional.signal import (
    best_weights,
    cross_fit,
    moments,
    sibling_gain,
    transition_costs,
)
from flowalign.functional.transition import FlowSDE, transition
from flowalign.runs.session import open_run
from flowalign.sampling.sde_windows import Random
from flowalign.studies.probe import sums as module
from flowalign.studies.probe.figures import (
    comparison,
    drift,
    rank,
    recommend,
    recommend_weights,
    summary,
)
from flowalign.studies.probe.measure import (
    OutcomeVariance,
    gradients_of_steps,
    outcome_variance,
    probe,
    probes,
)
from flowalign.studies.probe.sums import BlockSums, adam_scale, projection
from flowalign.training.policy_gradient.batches import minibatches
from flowalign.training.rollouts.collecting import completion_values, rollout
from flowalign.types import RewardOutput, plain_requests
from flowalign.utils.errors import TrainingFailure
from tests.fixtures.credited import credited
from tests.fixtures.pixel import Redness
from tests.fixtures.probes import new_judged
from tests.fixtures.small_run import go, new_run
from tests.fixtures.training import PROMPTS, flat, new_learner, new_recipe, new_rewards


def one_batch(step_weight="uniform", micro_batch=5):
    recipe = new_recipe(step_weight=step_weight, micro_batch=micro_batch)
    learner = new_learner()
    trajectory = rollout(
        recipe.rollouts, learner, Requests(plain_requests(PROMPTS), 3).batch(0, 3), 0, 0
    )
    values = completion_values(recipe.rollouts, learner, new_rewards(), trajectory)
    return recipe, learner, credited(recipe, learner, values)[0]


def test_the_gradients_of_the_steps_add_up_to_that_of_the_update():
    recipe, learner, batch = one_batch()
    found = dict(gradients_of_steps(recipe, learner, batch))
    assert sorted(found) == [0, 1, 2]
    for one in minibatches(batch, torch.arange(len(batch.mask)), 100):
        fields = batch.fields(learner.policy, learner.reference)
        loss, _ = recipe.algorithm.loss(fields, one)
        (one.num_rows / int(batch.mask.sum()) * loss).backward()
    whole = torch.cat([p.grad.flatten() for p in learner.parameters])
    torch.testing.assert_close(sum(found.values()), whole, atol=1e-7, rtol=1e-5)
    assert all(g.abs().max() > 1e-4 for g in found.values())
    assert not torch.allclose(found[0], found[1], rtol=0.1)


def test_they_depend_neither_on_the_micro_batch_nor_on_the_weights_of_the_steps():
    reference = dict(gradients_of_steps(*one_batch()))
    for changes in ({"micro_batch": 2}, {"step_weight": "std"}):
        found = dict(gradients_of_steps(*one_batch(**changes)))
        for k, gradient in reference.items():
            torch.testing.assert_close(found[k], gradient, atol=1e-7, rtol=1e-4)


def test_they_do_not_depend_on_the_scale_of_a_loss_in_half_precision():
    """A scale under which they overflow is lowered until they do not."""
    recipe, learner, batch = one_batch()
    batch = batch.with_samples(advantage=1e4 * batch.advantage)
    reference = dict(gradients_of_steps(recipe, learner, batch))
    learner.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    learner.scaler.scale(torch.zeros(1))
    found = dict(gradients_of_steps(recipe, learner, batch))
    assert learner.scaler.get_scale() < 2.0**127
    for k, gradient in reference.items():
        torch.testing.assert_close(found[k], gradient, atol=1e-3, rtol=1e-4)


def test_a_gradient_that_is_not_finite_is_told():
    recipe, learner, batch = one_batch()
    batch.advantage[0, 1] = torch.inf
    with pytest.raises(TrainingFailure, match="the gradient of step 1 is not finite"):
        dict(gradients_of_steps(recipe, learner, batch))


@pytest.fixture
def run(tmp_path):
    return new_run(tmp_path / "run", new_recipe(step_weight="std", micro_batch=5))


def found_of(run, batches, moments=None):
    parts = open_run(run)
    found = probe(run, parts, batches, moments)
    assert found is not None
    return found


def test_no_weight_moves_and_costs_are_those_of_the_batches(run):
    run.policy.load(torch.device("cpu"))
    before = flat(run.policy.denoiser)
    found = found_of(run, 6)
    assert torch.equal(flat(run.policy.denoiser), before)
    assert found.steps == [0, 1, 2]
    assert found.costs.reward_calls == found.costs.decodes == 6 * 12
    assert found.costs.sampling_evaluations == 6 * 12 * 4
    assert found.costs.training_evaluations == 6 * 12 * 3
    assert found.batches == 6
    assert found.own[0] > found.own[1] > found.own[2] > 0
    sums = found.gradient.sums
    assert sums.shape == (6, 3, 6, 3)
    assert not torch.equal(sums[0, 0, 1], sums[0, 0, 2])


@pytest.mark.slow
def test_a_critic_learns_from_batch_to_batch_and_costs_nothing(tmp_path):
    """The first batch is credited by outcome alone."""
    plain = found_of(new_run(tmp_path / "plain", new_recipe()), 6)
    recipe = new_recipe(credit=LambdaReturn(), critic=Critic(penalty=1.0))
    found = found_of(new_run(tmp_path / "critic", recipe), 6)
    assert found.costs == plain.costs
    ours, theirs = found.gradient.sums, plain.gradient.sums
    torch.testing.assert_close(ours[0, :, 0], theirs[0, :, 0])
    assert not torch.allclose(ours[4, :, 4], theirs[4, :, 4], rtol=0.01)


@pytest.mark.slow
def test_figures_do_not_depend_on_the_micro_batches(tmp_path):
    def products(folder, own, sampling):
        recipe = new_recipe({"micro_batch": sampling}, step_weight="std", micro_batch=own)
        found = found_of(new_run(tmp_path / folder, recipe), 6)
        return [found.gradient.sums, found.update.sums, torch.tensor(found.norms)]

    one, other = products("one", 64, 64), products("other", 3, 5)
    for a, b in zip(one, other, strict=True):
        assert (a - b).abs().max() < 1e-5 * a.abs().max()


def test_norms_are_those_of_the_update_with_the_weights_of_the_run_file(run):
    """In a run of one batch per block, they follow from the products."""
    found = found_of(run, 6)
    squares = torch.einsum("k,jkjl,l->j", found.own, found.gradient.sums, found.own)
    torch.testing.assert_close(
        torch.tensor(found.norms).double().square(), squares, rtol=1e-5, atol=0
    )


def test_many_batches_take_the_memory_of_sixteen_blocks():
    sums, gradients = BlockSums(40, lambda g: g), torch.randn(40, 2, 3).double()
    for i, batch in enumerate(gradients):
        for k, gradient in enumerate(batch):
            sums.add(i, k, gradient.clone())
    assert sum(g.numel() for block in sums.sums for g in block.values()) == 16 * 2 * 3
    found = sums.products([0, 1])
    assert found.batches.tolist() == [3] * 8 + [2] * 8
    whole = gradients.sum(0)
    torch.testing.assert_close(found.sums.sum((0, 2)), whole @ whole.T)


def test_steps_of_a_random_window_count_where_they_were_trained(tmp_path):
    recipe = new_recipe({"sde_window": Random(1, 0, 3)})
    found = found_of(new_run(tmp_path / "run", recipe), 12)
    assert found.steps == [0, 1, 2]
    within = found.gradient.sums.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    assert (within.diagonal(dim1=1, dim2=2) > 0).sum(1).tolist() == [1] * 12


def test_batches_in_which_no_reward_counts_are_no_probe(run):
    with pytest.raises(ValueError, match="no batch trained any step"):
        BlockSums(6, lambda g: g).products([])


def test_the_update_is_the_gradient_over_the_root_of_its_mean_square(run):
    """By hand from all batches: one block each, gradients multiplied by 1 / (rms + eps)."""
    parts = open_run(run)
    seen = {}
    add = BlockSums.add

    def watched(self, i, k, gradient):
        seen[i, k] = gradient.clone()
        add(self, i, k, gradient)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockSums, "add", watched)
        found = probe(run, parts, 6)
    whole = [sum(w * seen[i, k] for k, w in enumerate(found.own)) for i in range(6)]
    clipped = [g * min(1.0, 1.0 / float(g.norm())) for g in whole]
    rms = torch.stack(clipped).square().mean(0).sqrt() + 1e-8
    expected = (seen[1, 0] / rms) @ (seen[2, 1] / rms)
    assert float(found.update.sums[1, 0, 2, 1]) == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.slow
def test_moments_of_a_checkpoint_are_those_that_the_optimizer_goes_on_with(tmp_path):
    run = new_run(tmp_path / "run", device="cpu")
    go(run)
    state = tmp_path / "run" / "checkpoints" / "step-000005" / "state" / "training.safetensors"
    learner = new_learner(run.policy)
    scale = adam_scale(state, learner)
    assert len(scale) == sum(p.numel() for p in learner.parameters)
    again = new_run(tmp_path / "run", num_steps=5)
    found = found_of(again, 6, state)
    whole = found_of(again, 6)
    torch.testing.assert_close(found.gradient.sums, whole.gradient.sums)
    assert not torch.allclose(found.update.sums, whole.update.sums, rtol=0.1)


def test_projected_gradients_have_the_products_of_the_whole_ones_on_average(monkeypatch):
    """Of 40 projections to 64 sums, the mean is within 5 of its standard errors."""
    a, b = torch.randn(2, 400, generator=torch.Generator().manual_seed(1)).unbind()
    b = b + a
    monkeypatch.setattr(module, "PROJECTED", 64)
    found = []
    for seed in range(40):
        project = projection(400, torch.device("cpu"), seed)
        assert project(a).shape == (64,)
        found.append(project(a) @ project(b))
    values = torch.stack(found)
    assert (values.mean() - a @ b).abs() < 5 * values.std() / 40**0.5
    assert 0 < values.std() < a.norm() * b.norm()


@pytest.mark.slow
def test_gradients_that_need_too_much_memory_are_projected_with_and_without_moments(
    tmp_path, monkeypatch
):
    run = new_run(tmp_path / "run")
    go(run)
    state = tmp_path / "run" / "checkpoints" / "step-000005" / "state" / "training.safetensors"
    again = new_run(tmp_path / "run")
    whole = found_of(again, 8, state)
    monkeypatch.setattr(module, "MOST_BYTES", 0)
    found, unknown = found_of(again, 8, state), found_of(again, 8)
    assert found.is_projected
    assert not whole.is_projected
    assert unknown.update is None
    for a, b in ((whole.gradient, found.gradient), (whole.update, found.update)):
        assert moments(b).noise.diagonal().tolist() == pytest.approx(
            moments(a).noise.diagonal().tolist(), rel=0.05
        )


@pytest.mark.parametrize("batches", [0, 5])
def test_too_few_batches_are_refused_before_anything_loads(batches):
    with pytest.raises(ValueError, match=f"batches is {batches}; "):
        list(probes([], batches))


class Brightness(Redness):
    """Mean of the latents, which is linear in them."""

    def score(self, batch):
        value = batch.media.clamp(1e-6, 1 - 1e-6).logit().mean((1, 2, 3, 4))
        return RewardOutput.build(self.spec, torch.stack([value, torch.zeros_like(value)], 1), {})


@pytest.mark.slow
def test_the_variance_of_a_linear_chain_is_that_of_its_steps(tmp_path):
    """x' = a x + b e, so step k causes (b_k a_{k+1} ...)^2 / 3, and all together the total."""
    run = new_run(tmp_path / "run", new_recipe(), [Brightness()])
    found = outcome_variance(run, open_run(run), 1500)
    assert found is not None
    sigmas, eta, one = torch.linspace(1, 0, 5), torch.tensor([0.8] * 3 + [0.0]), torch.ones(1, 3)
    each = [transition(FlowSDE(), one, one, sigmas, k, eta[k : k + 1]) for k in range(4)]
    a, b = [float(step.mean[0, 0]) for step in each], [float(step.std.max()) for step in each]
    wanted = torch.tensor([(b[k] * math.prod(a[k + 1 :])) ** 2 / 3 for k in range(3)])
    total = wanted.sum() + math.prod(a) ** 2 / 3
    assert found.steps == [0, 1, 2]
    assert found.dims == ["redness", "green", "weighted sum"]
    torch.testing.assert_close(found.siblings[:, 2], wanted, rtol=0.08, atol=0)
    torch.testing.assert_close(found.prompt[2], total, rtol=0.08, atol=0)
    assert found.noise.max() < 1e-12
    more = {"children": 4, "ahead": torch.tensor([3.0, 2, 1]), "num_steps": 4}
    expected = sibling_gain(wanted, float(total), 0.0, **more)
    torch.testing.assert_close(found.gain, expected, rtol=0.15, atol=0)


def test_the_recommendation_names_the_steps_where_siblings_pay():
    dims, ones = ["red", "weighted sum"], torch.ones(2)
    gain, costs = torch.tensor([0.5, 1.5]), transition_costs(torch.tensor([5.0, 4.0]), 8, 4)
    found = OutcomeVariance(dims, [2, 3], torch.ones(2, 2), ones, ones, gain, costs)
    shown = format_credit(found)
    assert "splits [3], and recipe.step_weight 1 / 4" in shown["recommended"]
    assert shown["siblings of step 3"].endswith("gain 1.50, 5.75 forward passes per transition")
    assert shown["cost per transition"].startswith("outcomes 7 forward passes and 0.5 reward calls")
    never = replace(found, gain=torch.tensor([0.5, 0.9]))
    assert format_credit(never)["recommended"] == "outcome credit: siblings pay at no step"


# Figures of probes of known gradients: ranking, errors, and recommendations -----------------------


EARLY = [[8.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]]
LATE = EARLY[::-1]
NOTHING = [[0.0] * 4] * 3


def test_the_summary_has_both_metrics_costs_and_the_clip(tmp_path):
    judged = new_judged(tmp_path, "one", EARLY)
    found = summary(judged.setting, judged.probe)
    assert found["a_batch"] == {
        "network_evaluations": 1000,
        "reward_calls": 96,
        "decodes": 96,
        "seconds": 2,
    }
    for metric, products in (("gradient", judged.probe.gradient), ("update", judged.probe.update)):
        truth = moments(products)
        steps = found[metric]["steps"]
        assert [s["signal"] for s in steps] == pytest.approx(truth.signal.diagonal().tolist())
        assert [s["best_weight"] for s in steps] == best_weights(truth).tolist()
        assert all(s["signal_error"] > 0 < s["noise_error"] for s in steps)
    row = found["gradient"]["signal_to_noise"]["best weights"]
    assert row["value"] == pytest.approx(float(cross_fit(judged.probe.gradient)))
    assert row["per"]["network_evaluations"] == pytest.approx(row["value"])
    assert row["per"]["reward_calls"] == pytest.approx(row["value"] * 1000 / 96)
    assert row["per"]["seconds"] == pytest.approx(row["value"] * 30)
    assert found["clip"]["share"] == 1
    assert len(found["gradient"]["step_weight"]) == 4


def test_the_ranking_is_by_signal_for_evaluations_and_not_for_batches(tmp_path):
    dear = new_judged(tmp_path, "dear", EARLY, evaluations=10_000)
    cheap = new_judged(tmp_path, "cheap", EARLY, seed=1)
    rows = rank([dear, cheap])
    assert [row["name"] for row in rows] == ["cheap", "dear"]
    assert rows[0]["behind"] is None
    assert not rows[1]["within_error"]
    gap = rows[0]["per_1000_evaluations"]["value"] - rows[1]["per_1000_evaluations"]["value"]
    assert rows[1]["behind"]["value"] == pytest.approx(gap)


def test_noise_that_two_settings_share_is_no_error_of_their_difference(tmp_path):
    """The same batches at two prices: nothing but the price differs."""
    one, other = (new_judged(tmp_path, name, EARLY, seed=3) for name in ("one", "other"))
    row = rank([one, other])[1]
    assert row["behind"] == {"value": 0.0, "error": 0.0}
    apart = rank([one, new_judged(tmp_path, "apart", EARLY, seed=4)])[1]
    assert apart["behind"]["error"] > 0


@pytest.mark.slow
def test_weights_of_noise_are_not_recommended_on_average(tmp_path):
    """Judged by other batches, they show more than equal weights about every other time."""
    found = [recommend_weights(new_judged(tmp_path, "x", NOTHING, seed=k)) for k in range(30)]
    assert 4 < sum(weights is not None for weights in found) < 26
    assert all(any(weights) for weights in found if weights)


@pytest.mark.slow
def test_recommended_are_the_best_weights_of_the_best_setting_at_the_last_weights(tmp_path):
    judged = [
        new_judged(tmp_path, "early", EARLY, "step-000010", evaluations=10),
        new_judged(tmp_path, "early", EARLY, "step-000020"),
        new_judged(tmp_path, "nothing", NOTHING, "step-000020"),
    ]
    best = recommend(judged)
    assert best is judged[1]
    weights = recommend_weights(best)
    assert weights[0] == 1
    assert max(weights[1:]) < 0.5
    assert comparison(judged)["recommended"] == {
        "name": "early step-000020",
        "step_weight": weights,
    }


def test_weights_that_drift_are_worth_less_than_new_ones(tmp_path):
    before = new_judged(tmp_path, "one", EARLY, "step-000010")
    after = new_judged(tmp_path, "one", LATE, "step-000020", seed=1)
    same = new_judged(tmp_path, "one", EARLY, "step-000030", seed=2)
    other = new_judged(tmp_path, "other", EARLY, "step-000010")
    moved, stayed, _ = drift([before, after, same, other])
    assert (moved["from"], moved["to"]) == ("one step-000010", "one step-000020")
    assert moved["kept"]["value"] < 0.3 * moved["renewed"]["value"]
    assert not moved["within_error"]
    assert stayed["within_error"]


@pytest.mark.slow
def test_intervals_of_the_best_weights_hold_what_these_weights_are_worth(tmp_path):
    """Of 100 intervals of two standard errors, at least 85 hold the truth of weights so found.

    The truth is that of weights from halves of eight batches, over 200 other probes.
    """
    mean = torch.tensor(EARLY).double()

    def worth(weights):
        return (weights @ mean).square().sum() / (4 * weights.square().sum())

    def halves(judged):
        parts = (torch.arange(16) % 2 == k for k in (0, 1))
        return [best_weights(moments(judged.products, part)) for part in parts]

    others = [halves(new_judged(tmp_path, "x", EARLY, seed=1000 + k)) for k in range(200)]
    truth = torch.stack([worth(w) for pair in others for w in pair]).mean()
    found = [new_judged(tmp_path, "x", EARLY, seed=k).best for k in range(100)]
    covered = sum(bool((one.value - truth).abs() < 2 * one.error) for one in found)
    assert 85 <= covered <= 100
    spread = torch.stack([one.value for one in found]).std()
    assert torch.stack([one.error for one in found]).mean() == pytest.approx(float(spread), rel=0.4)
