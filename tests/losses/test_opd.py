"""OPD against the numbers of Flow-OPD's own code, and by hand."""

import math

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from flowalign.functional.forward_process import nft
from flowalign.functional.surrogate import ppo_clip
from flowalign.functional.transition import CPS
from flowalign.losses.matching.advantages import OPSD, opsd
from flowalign.losses.matching.opd import OPD
from flowalign.rewards.composite import Rewards
from flowalign.training.matching import RewardAscent, SamplerGrid, VisitedStates
from flowalign.training.matching.matching_recipe import Matching
from flowalign.training.matching.noising import noise_for
from flowalign.training.matching.source import StreamContext
from flowalign.types import Batch, LossContext
from tests.fixtures.golden import load
from tests.fixtures.pixel import PixelPolicy, Redness, SmoothRedness
from tests.fixtures.preference import train
from tests.fixtures.scored import batch_of, groups
from tests.fixtures.training import context, new_learner

# The authors' code --------------------------------------------------------------------------------


def recorded_steps(recorded, dt: float, **residuals) -> Batch:
    """Steps with the velocities as means. Their std is without the square root of dt."""
    count = len(recorded["std"])
    columns = {
        "weight": torch.ones(count),
        "travelled": torch.zeros_like(recorded["mean"]),
        "slope": torch.ones(count),
        "std": recorded["std"] * math.sqrt(dt),
        "dt": torch.full((count,), dt),
        "logp_old": recorded["logp_old"],
    }
    return Batch(columns | residuals)


@pytest.mark.parametrize("dt", [1.0, 0.13])
@pytest.mark.parametrize(("case", "anchor"), [("gkd", 0.0), ("gkd_kl", 0.04)])
def test_the_released_form_has_the_recorded_loss_and_gradient(case, anchor, dt):
    recorded = load("F_flow_opd", f"{case}.")
    mean = recorded["mean"].clone().requires_grad_()
    teacher, base = recorded["mean_teacher"], recorded["mean_base"]
    residuals = {"policy": mean - teacher, "reference": base - teacher}
    batch = recorded_steps(recorded, dt, **residuals)
    loss, stats = OPD(form="released", anchor=anchor).loss(batch)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(recorded["loss"]), rel=1e-5)
    assert_close(mean.grad, recorded["grad_mean"], rtol=1e-4, atol=1e-7)
    assert ("anchor_kl" in stats) == bool(anchor)


def test_the_reward_is_the_recorded_one_and_the_mean_over_all_pairs_is_not_ours():
    """Their ratio of each row meets the reward of every row."""
    recorded = load("F_flow_opd", "kl_only.")
    reward = recorded["adv_used"][:, 0]
    batch = recorded_steps(recorded, 1.0, policy=recorded["mean"] - recorded["mean_teacher"])
    _, stats = OPD(form="released", anchor=0.0).loss(batch)
    assert float(stats["teacher_kl"]) == pytest.approx(-float(reward.mean()), rel=1e-5)
    logp = recorded["logp"].clone().requires_grad_()
    pairs = [(i, j) for i in range(4) for j in range(4)]
    own, other = (tensor(side) for side in zip(*pairs, strict=True))
    log_ratio = logp - recorded["logp_old"]
    theirs = ppo_clip(log_ratio[own], reward[other], 1e-3).mean()
    theirs.backward()
    assert float(theirs.detach()) == pytest.approx(float(recorded["loss"]), rel=1e-5)
    assert_close(logp.grad, recorded["grad_logp"], rtol=1e-4, atol=1e-8)
    ours = ppo_clip(log_ratio.detach(), reward, 1e-3).mean()
    assert float(ours) != pytest.approx(float(recorded["loss"]), rel=1e-4)


# By hand ------------------------------------------------------------------------------------------


V, TAUGHT, BASE = (
    tensor([[1.0, 3.0], [0.0, -1.0]]),
    tensor([[2.0, 1.0]] * 2),
    tensor([[0.0, 3.0]] * 2),
)
REACHED = tensor([[1.5, 3.0], [0.0, 1.0]])


def by_hand(logp_old=(0.0, 0.0)) -> tuple[torch.Tensor, Batch]:
    v = V.clone().requires_grad_()
    columns = {
        "weight": torch.ones(2),
        "travelled": REACHED,
        "slope": tensor([-0.5, -0.2]),
        "std": tensor([0.5, 0.1]),
        "dt": tensor([0.25, 0.1]),
        "logp_old": tensor(logp_old),
        "policy": v - TAUGHT,
        "reference": BASE - TAUGHT,
        "target": TAUGHT,
    }
    return v, Batch(columns)


def logp_of_steps() -> list[float]:
    constant = [-math.log(std) - 0.5 * math.log(2 * math.pi) for std in (0.5, 0.1)]
    # slope^2 (travelled - v)^2 / (2 std^2): .25 * mean(.25, 0) / .5 and .04 * mean(0, 4) / .02
    return [constant[0] - 0.0625, constant[1] - 4.0]


def test_at_the_old_policy_the_gradient_is_that_of_the_reward_times_the_log_density():
    """The reward has no gradient, so the gradient of the mean is along the step taken."""
    v, batch = by_hand(logp_of_steps())
    batch = batch.with_columns(weight=tensor([1.0, 3.0]))
    loss, stats = OPD(form="policy_gradient", anchor=0.0, clip=0.2).loss(batch)
    loss.backward()
    kl = [0.25 * 2.5 / 0.5, 0.04 * 4.0 / 0.02]  # mean square of (-1, 2) and of (-2, -2)
    assert float(stats["teacher_kl"]) == pytest.approx(sum(kl) / 2)
    assert float(stats["ratio_mean"]) == pytest.approx(1.0, abs=1e-5)
    assert float(loss.detach()) == pytest.approx((kl[0] + 3 * kl[1]) / 2, rel=1e-5)
    # d logp / d v = slope^2 (travelled - v) / (2 elements std^2) * 2; loss = weight KL ratio
    scale = [0.25 / 0.5 * kl[0], 3 * 0.04 / 0.02 * kl[1]]
    expected = torch.stack([s / 2 * (REACHED - V)[i] for i, s in enumerate(scale)])
    assert_close(v.grad, expected, rtol=1e-4, atol=1e-6)


def test_the_anchor_is_minimised_itself_with_the_same_weight_per_step():
    _, batch = by_hand(logp_of_steps())
    plain, more = (OPD(form="policy_gradient", anchor=a).loss(batch)[0] for a in (0.0, 0.3))
    distance = [0.25 * 0.5 / 0.5, 0.04 * 8.0 / 0.02]  # mean square of (1, 0) and of (0, -4)
    assert float((more - plain).detach()) == pytest.approx(0.3 * sum(distance) / 2, rel=1e-4)


def test_a_ratio_beyond_the_clip_stops_a_step_that_was_worse():
    v, batch = by_hand([logp_of_steps()[0] + 1.0, logp_of_steps()[1]])
    loss, stats = OPD(form="policy_gradient", anchor=0.0, clip=0.1).loss(batch)
    loss.backward()
    assert v.grad is not None
    assert float(v.grad[0].abs().max()) == 0 < float(v.grad[1].abs().max())
    assert float(stats["clip_frac_low"]) == 0.5


def test_densities_of_cps_are_those_of_its_code():
    _, batch = by_hand([-0.25 * 0.125, -0.04 * 2.0])
    _, stats = OPD(form="sampled", anchor=0.0).loss(batch, LossContext(kernel=CPS()))
    assert float(stats["ratio_mean"]) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("form", ["sampled", "policy_gradient"])
def test_over_all_steps_a_sampled_reward_descends_the_kl_and_its_mean_nothing(
    form,
):
    """Slope 2 and std .4: the KL is 4 mean((v - taught)^2) / .32, of two elements."""
    count = 200_000
    v = tensor([[0.3, -0.2]], requires_grad=True)
    taught, slope, std = tensor([[0.5, 0.1]]), 2.0, 0.4
    noise = torch.randn(count, 2, generator=torch.Generator().manual_seed(3))
    own = v.expand(count, 2)
    logp = -noise.square().mean(1) / 2 - math.log(std) - 0.5 * math.log(2 * math.pi)
    columns = {
        "weight": torch.ones(count),
        "travelled": v.detach() + std / slope * noise,
        "slope": torch.full((count,), slope),
        "std": torch.full((count,), std),
        "dt": torch.full((count,), 0.1),
        "logp_old": logp,
        "policy": own - taught,
        "target": taught.expand(count, 2),
    }
    loss, _ = OPD(form=form, anchor=0.0, clip=1.0).loss(Batch(columns))
    loss.backward()
    # Log-densities are means over the elements, so this is half of the KL's own gradient.
    descent = 0.5 * slope**2 * (v.detach() - taught) / std**2 / 2
    expected = descent if form == "sampled" else torch.zeros_like(descent)
    assert_close(v.grad, expected, atol=2e-2, rtol=0)


# DiffusionOPSD: the fit of two targets, and its targets from a rollout ----------------------------


ASCENT = RewardAscent(query=2, steps=2, radius=0.1)


def rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_loss_of_one_row_by_hand():
    """Both residuals are (.1, -.1) up to signs, with mean square .01 and mean size .1."""
    change, up = tensor([[0.2, 0.0]]), tensor([[0.1, 0.1]])
    assert_close(opsd(change, up, -up, tensor([0.5]), 1.0), tensor([0.1]))


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_on_policy_with_opposite_targets_the_weight_cancels(beta):
    """The gradient is -2 beta d / (D mean|d|), for d = y+ - y0 and any weight."""
    up, change = rows(3, 8), torch.zeros(3, 8, dtype=torch.float64, requires_grad=True)
    loss = opsd(change, up, -up, tensor([0.1, 0.5, 0.9], dtype=torch.float64), beta).sum()
    (slope,) = torch.autograd.grad(loss, change)
    assert_close(slope, -2 * beta * up / 8 / up.abs().mean(1, keepdim=True))


def test_equal_targets_at_the_data_are_nft_times_beta():
    policy, old = rows(3, 8, seed=1), rows(3, 8, seed=2)
    sigma = tensor([0.3, 0.5, 0.9], dtype=torch.float64)
    optimal, s = tensor([0.2, 0.5, 1.0], dtype=torch.float64), sigma[:, None]
    to_data = s * old  # x0 - y0 for the residual v_old - (noise - x0)
    found = opsd(-s * (policy - old), to_data, to_data, optimal, 0.5)
    assert_close(found, 0.5 * nft(policy, old, sigma, optimal, 0.5))


def rewards_of(reward):
    return Rewards([reward], {"redness": 1.0})


def opened(tmp_path, learner, **changes):
    data = groups(tmp_path, ascent=ASCENT, **changes)
    return data.open(learner, StreamContext(rewards_of(SmoothRedness()), 0))


def redness(latents):
    pixels = latents.sigmoid()
    return pixels[:, 0] - pixels[:, 2]


def test_clean_predictions_at_the_query_move_up_and_down_the_reward(tmp_path):
    learner = new_learner(PixelPolicy(seed=1))
    batch = batch_of(opened(tmp_path, learner))
    examples, state = batch.examples, batch.visited.state(2)
    sigma = torch.full((12,), 0.5)
    with torch.no_grad():
        v = learner.policy.velocity(state, sigma, examples["cond"])
    assert_close(examples["latents"], state - 0.5 * v)
    now, up, down = (
        redness(examples["latents"] + d) for d in (0.0, examples["ascent"], examples["descent"])
    )
    assert (up > now).all()
    assert (down < now).all()
    ball = 0.1 * examples["latents"].norm(dim=1)
    for moved in (examples["ascent"], examples["descent"]):
        assert (moved.norm(dim=1) <= ball * (1 + 1e-5)).all()
    cfg = settings(data=groups(tmp_path, ascent=ASCENT))
    part = noise_for(cfg, learner.policy, examples, 0, (0, 0, 0), visited=batch.visited).all()
    matched = cfg.states.build(part, learner.policy, None)
    assert_close(matched["x"], state)
    assert_close(matched["target"], v)


def settings(data, **changes):
    times = SamplerGrid(num_steps=4, start=2, stop=3)
    defaults = {"loss": OPSD(), "times": times, "states": VisitedStates(), "micro_batch": 12}
    return Matching(data=data, **defaults | changes)


@pytest.mark.slow
def test_training_raises_the_reward(tmp_path):
    learner = new_learner(PixelPolicy(seed=1), learning_rate=0.02)
    cfg = settings(groups(tmp_path, ascent=ASCENT))
    stream = opened(tmp_path, learner)
    history = train(cfg, learner, stream, 12)
    assert history[-1]["reward_mean"] > history[0]["reward_mean"] + 0.1
    assert history[0]["progress_to_target"] == pytest.approx(0, abs=1e-6)


def test_only_the_query_is_matched_and_rewards_need_gradients(tmp_path):
    smooth = context(rewards=rewards_of(SmoothRedness()))
    data = groups(tmp_path, ascent=ASCENT)
    settings(data).check(smooth)
    with pytest.raises(ValueError, match=r"set times.start to 2, and stop to 3"):
        settings(data, times=SamplerGrid(num_steps=4)).check(smooth)
    with pytest.raises(ValueError, match=r"no gradient, which recipe.data.ascent needs"):
        settings(data).check(context(rewards=rewards_of(Redness())))
    with pytest.raises(ValueError, match=r"ascent.query is 4, which is not among"):
        groups(tmp_path, ascent=RewardAscent(query=4))
    with pytest.raises(ValueError, match=r"set weight_map to null"):
        groups(tmp_path, ascent=ASCENT, weight_map="region")
    with pytest.raises(ValueError, match=r"ascent.query is 0"):
        RewardAscent(query=0)
