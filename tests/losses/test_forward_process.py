"""Losses of reinforcement learning on the forward process: recorded numbers and equalities.

Residuals are made of the recorded predictions, or of the recordings' network, in double precision.
"""

from math import acos, log, pi

import pytest
import torch
from torch import Tensor, tensor
from torch.testing import assert_close

from flowalign.extra import KVPO
from flowalign.functional.forward_process import nft, optimality, self_normalised_error
from flowalign.functional.noise_matching import add_noise, sample_error
from flowalign.functional.transition import CPS, per_row
from flowalign.losses import AWM, CRD, DGPO, NFT
from flowalign.losses.matching.advantages import FDFO, pair_contrast, simple_policy_loss
from flowalign.sampling.sde_windows import AllButLast
from flowalign.training.matching import SamplerGrid, VisitedStates
from flowalign.training.matching.matching_recipe import Matching
from flowalign.training.matching.noising import noise_for
from flowalign.training.matching.reference_models import Average
from flowalign.training.matching.source import StreamContext
from flowalign.types import ALONE, Batch, LossContext, MatchingLoss
from flowalign.types.losses import FIELDS
from tests.fixtures.golden import load, tiny_velocity
from tests.fixtures.matching_losses import LOSSES
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.preference import train
from tests.fixtures.scored import batch_of, groups, opened
from tests.fixtures.training import context, new_learner, new_rewards


def scored(
    advantage: Tensor,
    group: Tensor | None = None,
    weight: Tensor | None = None,
    **residuals: Tensor,
) -> Batch:
    """Rows with these advantages; without groups all rows belong to one."""
    n = len(advantage)
    columns = {
        "weight": torch.ones(n) if weight is None else weight,
        "advantage": advantage,
        "group": torch.zeros(n, dtype=torch.long) if group is None else group,
    }
    return Batch(columns | residuals)


def run(loss: MatchingLoss, batch: Batch, context: LossContext = ALONE):
    """Value, log and gradient with respect to the policy's residual."""
    policy = batch["policy"].clone().requires_grad_()
    value, stats = loss.loss(batch.with_columns(policy=policy), context)
    return value.detach(), stats, torch.autograd.grad(value, policy)[0]


def assert_gradient(got: Tensor, recorded: Tensor, rtol: float = 1e-4) -> None:
    assert_close(got.float(), recorded.float(), rtol=rtol, atol=1e-7)


# Recorded -----------------------------------------------------------------------------------------


def recorded_residuals(recorded, sigma, noise, x0, cond, *networks):
    """Residuals of these networks on the recorded noise, in their order, and the target."""
    x = add_noise(x0.double(), noise.double(), sigma.double())
    target = (noise - x0).double()
    return [tiny_velocity(recorded, n, x, sigma, cond) - target for n in networks], target


@pytest.mark.parametrize("step", range(3))
@pytest.mark.parametrize(("beta", "kl"), [(1.0, 1e-4), (0.1, 1e-2)])
def test_nft_is_the_recorded_one(beta, kl, step):
    recorded = load("F_nft", f"default_beta{beta}.")
    sigma = recorded["timesteps"][:, step] / 1000
    (policy, old, base), _ = recorded_residuals(
        recorded, sigma, recorded["noise"][step], recorded["x0"], recorded["cond"], "policy", "old",
        "base",
    )  # fmt: skip
    assert_close(policy.float(), recorded["pred"][step] - recorded["noise"][step] + recorded["x0"])
    advantage = recorded["advantages"][:, step].double()
    batch = scored(advantage, policy=policy, old=old, sigma=sigma.double())
    value, stats, grad = run(NFT(beta=beta), batch)
    each = recorded["per_sample_loss"][step]
    assert_close(value.float(), 5 * each.mean(), rtol=1e-5, atol=0)
    assert_close(stats["optimality"].float(), recorded["r"][step].mean())
    divergence = (policy - base).square().mean()
    assert_close((value + kl * divergence).float(), recorded["loss"][step], rtol=1e-5, atol=0)
    grad = grad + kl * 2 * (policy - base) / policy.numel()
    assert_gradient(grad, recorded["grad_pred"][step])


@pytest.mark.parametrize("step", range(3))
@pytest.mark.parametrize("mode", ["positive_only", "negative_only", "one_only", "binary"])
def test_nft_of_other_optimalities_is_the_recorded_one(mode, step):
    recorded = load("F_nft", f"{mode}_beta1.0.")
    target = recorded["noise"][step] - recorded["x0"]
    policy, old = (recorded[name][step] - target for name in ("pred", "pred_old"))
    each = nft(policy, old, recorded["timesteps"][:, step] / 1000, recorded["r"][step], 1.0)
    assert_close(each, recorded["per_sample_loss"][step], rtol=1e-5, atol=1e-6)


WEIGHTINGS = {
    "uniform": "Uniform",
    "sigma": "t",
    "sigma_squared": "t**2",
    "huber": "huber",
    "generalised_huber": "ghuber",
}


def awm_residuals(*networks):
    recorded = load("F_awm")
    x0, cond = recorded["x0"].repeat(3, 1, 1, 1), recorded["cond"].repeat(3, 1)
    found, _ = recorded_residuals(recorded, recorded["t"], recorded["noise"], x0, cond, *networks)
    return recorded, found


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_the_gradient_of_awm_on_policy_is_that_of_the_recorded_likelihood(weighting):
    """With advantages of 1 the mean over 12 rows has -1/12 of the gradient of the sum of logp."""
    recorded, (policy,) = awm_residuals("policy")
    loss = AWM(weighting=weighting, advantage_scale=1.0, anchor_weight=0.0)
    batch = scored(torch.ones(12), policy=policy, sigma=recorded["t"].double())
    value, _, grad = run(loss, batch)
    assert value == -1
    assert_gradient(-12 * grad, recorded[f"grad_logp.{WEIGHTINGS[weighting]}"])


@pytest.mark.parametrize(
    ("case", "loss"),
    [
        ("onpolicy_expfirst", AWM()),
        ("offpolicy_expfirst", AWM(ratio_to="old", clip=0.02)),
    ],
)
def test_awm_is_the_recorded_one(case, loss):
    recorded, (policy, old, ema, base) = awm_residuals("policy", "old", "ema", "base")
    advantage = recorded["advantages"].clamp(-5, 5).repeat(3)
    known = {"policy": policy, "old": old, "anchor": ema, "sigma": recorded["t"].double()}
    value, stats, grad = run(loss, scored(advantage.double(), **known))
    assert_close(stats["ratio"], recorded[f"{case}.ratio"].mean(), rtol=1e-6, atol=0)
    assert_close(stats["anchor_distance"], recorded[f"{case}.ema_kl"], rtol=1e-5, atol=0)
    divergence = (policy - base).square().mean()
    assert_close(value + 0.003 * divergence, recorded[f"{case}.loss"], rtol=1e-5, atol=0)
    grad = grad + 0.003 * 2 * (policy - base) / policy.numel()
    assert_gradient(grad, recorded[f"{case}.grad_pred"])


@pytest.mark.parametrize(
    ("case", "kl", "loss"),
    [
        ("plain", 0.0, DGPO(beta=100.0, clip=None)),
        ("clip", 0.01, DGPO(beta=100.0, clip=4e-4)),
        ("emaref", 0.02, DGPO(beta=500.0, clip=4e-4, relative_to="old")),
    ],
)
def test_dgpo_is_the_recorded_one(case, kl, loss):
    recorded = load("F_dgpo", f"{case}.")
    policy, reference, old = (
        recorded[name] - recorded["target"] for name in ("pred", "pred_ref", "pred_old")
    )
    known = {"policy": policy, "reference": reference, "old": old}
    batch = scored(recorded["advantages"].clamp(-5, 5), recorded["group"], **known)
    value, stats, grad = run(loss, batch)
    z = recorded["z"]
    assert_close(stats["margin"], -z.mean(), rtol=1e-5, atol=0)
    assert_close(value, torch.nn.functional.softplus(z).mean(), rtol=1e-5, atol=0)
    clipped = recorded.get("clipped", torch.zeros(4))
    assert_close(stats["clip_fraction"], clipped.float().mean())
    grad = grad + kl * 2 * (policy - reference) / policy.numel()
    assert_gradient(grad, recorded["grad_pred"])


@pytest.mark.parametrize("step", range(3))
@pytest.mark.parametrize(
    ("case", "guidance", "loss"),
    [
        ("default", 4.5, CRD()),
        ("beta0.1", 4.5, CRD(beta=0.1)),
        ("bce", 4.5, CRD(form="bce")),
        ("plain_kl", 1.0, CRD(least_kl=0.1)),
    ],
)
def test_crd_is_the_recorded_one(case, guidance, loss, step):
    recorded = load("F_crd", f"{case}.")
    sigma, noise, x0 = recorded["timesteps"][step] / 1000, recorded["noise"][step], recorded["x0"]
    (policy, old, ref), _ = recorded_residuals(
        recorded, sigma, noise, x0, recorded["cond"], "policy", "old", "ref"
    )
    empty = recorded["uncond"].expand(4, -1)
    (unconditional,), _ = recorded_residuals(recorded, sigma, noise, x0, empty, "ref")
    guided = unconditional + guidance * (ref - unconditional)
    known = {"policy": policy, "reference": guided, "old": old, "sigma": sigma}
    value, _, grad = run(loss, scored(recorded["advantages"].clamp(-5, 5).double(), **known))
    assert_close(value.float(), recorded["loss"][step].float(), rtol=1e-5, atol=0)
    assert_gradient(grad, recorded["grad_pred"][step], rtol=2e-4)


# Equalities ---------------------------------------------------------------------------------------

ADVANTAGE = tensor([1.7, -0.4, -2.9, 0.6, 0.2, -1.1], dtype=torch.float64)
GROUP = tensor([4, 9, 4, 9, 9, 4])
SIGMA = tensor([0.9, 0.35, 0.9, 0.35, 0.35, 0.9], dtype=torch.float64)


def drawn(advantage=ADVANTAGE, group=GROUP, weight=None, seed=0) -> Batch:
    """Six rows with residuals that share no number."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale=1.0):
        return scale * torch.randn(6, 2, 3, 5, generator=generator, dtype=torch.float64)

    policy = normal()
    reference, old, anchor = (policy + normal(s) for s in (0.3, 0.2, 0.1))
    known = {"reference": reference, "old": old, "anchor": anchor, "target": normal()}
    return scored(advantage, group, weight, policy=policy, sigma=SIGMA, **known)


def gradient(function, policy: Tensor) -> Tensor:
    policy = policy.clone().requires_grad_()
    return torch.autograd.grad(function(policy), policy)[0]


@pytest.mark.parametrize("beta", [0.1, 1.0, 3.0])
def test_nft_at_its_old_policy_weights_self_normalised_errors_whatever_beta(beta):
    batch = drawn()
    batch = batch.with_columns(old=batch["policy"])

    def weighted(v: Tensor) -> Tensor:
        return (ADVANTAGE * self_normalised_error(per_row(SIGMA, v) * v)).mean()

    value, _, grad = run(NFT(beta=beta), batch)
    assert_close(grad, gradient(weighted, batch["policy"]))
    assert_close(run(NFT(beta=2.0), batch)[0], beta / 2 * value)


def test_away_from_its_old_policy_beta_changes_the_direction_of_nft():
    batch = drawn()
    one, other = (run(NFT(beta=beta), batch)[2].flatten() for beta in (0.1, 1.0))
    assert torch.cosine_similarity(one, other, dim=0) < 0.999


@pytest.mark.parametrize("clip", [None, 1e6])
def test_dgpo_has_the_value_and_the_gradient_over_beta_of_its_sigmoid_form(clip):
    batch, beta = drawn(), 2.5

    def preference(v):
        change = beta * ADVANTAGE * (sample_error(v) - sample_error(batch["reference"]))
        z = torch.stack([change[group == GROUP].mean() for group in GROUP.unique()])
        return -torch.nn.functional.logsigmoid(-z).mean()

    value, _, grad = run(DGPO(beta=beta, clip=clip), batch)
    assert_close(value, preference(batch["policy"]))
    assert_close(grad, gradient(preference, batch["policy"]) / beta)


def test_dgpo_holds_errors_near_the_references_and_stops_rows_that_ran_away():
    """The terms of TDM-R1, on top of the gradient without them."""
    batch = drawn()
    plain = DGPO(beta=3.0, clip=None)
    _, _, grad = run(plain, batch)
    reference = sample_error(batch["reference"])

    def drift(v: Tensor) -> Tensor:
        return 0.4 * (sample_error(v) - reference).square().mean()

    _, _, held = run(DGPO(beta=3.0, clip=None, drift=0.4), batch)
    assert_close(held, grad + gradient(drift, batch["policy"]))
    change = sample_error(batch["policy"]) - reference
    limit = float(change.square().median())
    away = (ADVANTAGE * change < 0) & (change.square() > limit)
    assert away.any()
    assert not away.all()
    _, stats, stopped = run(DGPO(beta=3.0, clip=None, runaway=limit), batch)
    assert_close(stats["clip_fraction"], away.float().mean())
    assert_close(stopped, torch.where(away.reshape(-1, 1, 1, 1), 0.0, grad))


def test_crd_at_its_old_policy_pulls_and_pushes_by_the_centred_optimality():
    batch = drawn()
    batch = batch.with_columns(old=batch["policy"])
    optimal = optimality(ADVANTAGE, 5.0)
    centred = optimal - torch.stack([optimal[group == GROUP].mean() for group in GROUP])
    wanted = gradient(
        lambda v: (5 * 2 * centred * self_normalised_error(v)).mean(), batch["policy"]
    )
    assert_close(run(CRD(kl=0.0), batch)[2], wanted)


@pytest.mark.parametrize("loss", [DGPO(beta=3.0, clip=None), CRD(), KVPO(kl=0.4)])
def test_a_group_is_compared_with_itself_only(loss):
    """The other group may be anything, or absent; its rows take their share of the mean alone."""
    batch, other, inside = drawn(), drawn(seed=1), GROUP == 4
    row = inside.reshape(-1, 1, 1, 1)
    grad = run(loss, batch)[2]
    networks = "policy", "reference", "old"
    mixed = {name: torch.where(row, batch[name], other[name]) for name in networks}
    changed = torch.where(inside, ADVANTAGE, -ADVANTAGE)
    moved = run(loss, batch.with_columns(advantage=changed, **mixed))[2]
    assert_close(moved[inside], grad[inside])


# By hand ------------------------------------------------------------------------------------------


def test_crd_with_a_temperature_by_hand():
    """r = (1, 0), T = 1 / log 3: means weighted by (3/4, 1/4) and by (1/4, 3/4).

    The errors 2 of the old policy and (1, 2) of the policy give the implicit rewards (1, 0), which
    are centred to (1/4, -3/4) and (3/4, -1/4), as r. At beta 2 the squared differences are the same
    numbers squared, over beta: 5 ((1/16 + 9/16) / 2) / 2 for both means, where one mean gives 5/8.
    """
    old, policy = torch.full((2, 1), 2.0), tensor([[1.0], [2.0]])
    batch = scored(tensor([5.0, -5.0]), policy=policy, old=old)
    loss = CRD(beta=2.0, kl=0.0, temperature=1 / log(3))
    assert run(loss, batch)[0].item() == pytest.approx(5 * 10 / 64)
    assert run(CRD(beta=2.0, kl=0.0), batch)[0].item() == pytest.approx(5 / 8)


def test_kvpo_by_hand():
    """Errors of x0 .5^2 (4, 0) = (1, 0), old (0, 0): pi = (1, e^2) / (1 + e^2) at scale 2."""
    policy, old = tensor([[2.0], [0.0]]), tensor([[0.0], [0.0]])
    known = {"policy": policy, "reference": old, "old": old, "sigma": tensor([0.5, 0.5])}
    batch = scored(tensor([1.0, 2.0]), **known)
    value, stats, _ = run(KVPO(scale=2.0, clip_high=0.3, kl=0.5), batch)
    likely = 1 / (1 + torch.e**-2)
    ratios = [2 * (1 - likely), 2 * likely]
    divergence = [2 * p * log(2 * p) for p in (1 - likely, likely)]
    wanted = (-ratios[0] - 1.3 * 2) / 2 + 0.5 * sum(divergence) / 2
    assert ratios[1] > 1.3
    assert_close(value, tensor(wanted))
    assert stats["clip_fraction"] == 0.5


def test_the_value_of_dgpo_starts_at_log_two_and_a_worse_policy_has_more():
    batch = drawn()
    policy = batch["policy"]
    same = batch.with_columns(reference=policy, old=policy)
    assert run(DGPO(), same)[0].item() == pytest.approx(log(2))
    worse = same.with_columns(policy=policy * (1 + 0.1 * per_row(ADVANTAGE.sign(), policy)))
    assert run(DGPO(), worse)[0] > log(2)


def test_dgpo_stops_rows_that_have_moved_too_far_but_not_those_that_come_back():
    """l_old - l = log 1.2 in all rows; only rows to be matched better have moved too far."""
    error = log(1.2)
    policy = tensor([[1.0], [1.0], [1.0]])
    old = (1 + tensor(error)).sqrt().expand(3, 1)
    batch = scored(tensor([2.0, -1.0, 0.5]), policy=policy, reference=policy, old=old)
    for clip, stopped in ((0.1, [0, 2]), (0.3, [])):
        _, stats, grad = run(DGPO(clip=clip), batch)
        assert (grad[:, 0] == 0).nonzero().flatten().tolist() == stopped
        assert stats["clip_fraction"].item() == pytest.approx(len(stopped) / 3)


# Rows, weights and processes ----------------------------------------------------------------------

EVERY = {k: v for k, v in LOSSES.items() if "advantage" in v.needs}
every = pytest.mark.parametrize("loss", EVERY.values(), ids=EVERY)
WEIGHT = tensor([1.4, 0.3, 0.9, 2.0, 1.1, 0.6], dtype=torch.float64)


@every
def test_good_samples_are_matched_better_and_bad_ones_worse_at_the_start(loss):
    """The gradient along the residual, where all networks are equal, has the advantage's sign."""
    policy = drawn()["policy"]
    advantage = tensor([1.7, -0.4, -2.9, 0.6, 0.2, -1.1], dtype=torch.float64)
    advantage = advantage - torch.stack([advantage[g == GROUP].mean() for g in GROUP])
    grad = run(loss, drawn(advantage).with_columns(**dict.fromkeys(FIELDS, policy)))[2]
    slope = (grad * policy).flatten(1).sum(1)
    assert torch.equal(slope.sign(), advantage.sign())


def split(loss, batch, parts):
    """The gradient of every row if each part of the rows is on a separate process."""
    tables: list[Tensor] = []
    for index in parts:  # what each process gathers, before any knows the others'
        run(loss, batch.take(index), LossContext(gather=_recorder(tables)))
    grad = torch.zeros_like(batch["policy"])
    value = torch.zeros((), dtype=torch.float64)
    together = LossContext(gather=lambda _: torch.cat(tables))
    for index in parts:
        part, _, some = run(loss, batch.take(index), together)
        grad[index] = some * len(index) / 6
        value += part * len(index) / 6
    return value, grad


def _recorder(tables):
    def gather(table):
        tables.append(table.detach())
        return table.detach()

    return gather


GATHERING = {k: v for k, v in EVERY.items() if "group" in v.needs and k != "kvpo"}


@pytest.mark.parametrize("loss", GATHERING.values(), ids=GATHERING)
def test_groups_split_between_processes_are_gathered(loss):
    batch = drawn(weight=WEIGHT)
    value, _, grad = run(loss, batch)
    other, moved = split(loss, batch, (tensor([4, 0]), tensor([1, 2, 3, 5])))
    assert_close(other, value)
    assert_close(moved, grad)


def test_kvpo_refuses_groups_split_between_processes_and_takes_whole_ones():
    batch = drawn(weight=WEIGHT)
    whole = (tensor([0, 2, 5]), tensor([1, 3, 4]))
    value, _, grad = run(KVPO(), batch)
    other, moved = split(KVPO(), batch, whole)
    assert_close(other, value)
    assert_close(moved, grad)
    with pytest.raises(ValueError, match="KVPO needs all rows of a group on one process"):
        split(KVPO(), batch, (tensor([4, 0]), tensor([1, 2, 3, 5])))


@every
def test_a_process_without_rows_takes_part_in_what_the_others_gather(loss):
    calls = []
    none = torch.zeros(0)
    empty = dict.fromkeys(("policy", *FIELDS, "target"), torch.zeros(0, 2, 3))
    context = LossContext(gather=lambda t: calls.append(len(t)) or t.detach())
    loss.loss(scored(none, sigma=none, **empty), context)
    assert calls == [0] * ("group" in loss.needs)


def test_a_kl_of_bad_samples_above_that_of_good_ones_is_refused():
    with pytest.raises(ValueError, match=r"kl is 0\.1 and least_kl 0\.2"):
        CRD(kl=0.1, least_kl=0.2)


# FDFO: pairs of noisy trajectories, their directions, and the loss of their velocities ------------


def test_directions_and_loss_by_hand():
    """d = (1, 0), mean d^2 = .5, u = (2, 0); rho = exp(2 - 4.5) for the change (1, 0)."""
    clean = tensor([[1.5, 0.0], [-0.5, 0.0]])
    direction = pair_contrast(clean)
    assert_close(direction, tensor([[2.0, 0.0], [-2.0, 0.0]]), rtol=1e-5, atol=1e-5)
    change = tensor([[1.0, 0.0]])
    ratio = tensor([2.0 - 4.5]).exp()
    got = simple_policy_loss(change, tensor([[2.0, 0.0]]), tensor([0.5]), 0.1)
    assert_close(got, -0.5 * ratio + 0.5 / 0.2 * (ratio - 1) ** 2)


def test_the_first_gradient_follows_the_direction_and_both_branches_agree():
    """2 g u / D, the same for both rows, because both signs are flipped."""
    clean = torch.randn(2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    direction, gain = pair_contrast(clean), tensor([0.7, -0.7], dtype=torch.float64)
    change = torch.zeros(2, 6, dtype=torch.float64, requires_grad=True)
    loss = simple_policy_loss(change, direction, gain, 0.03).sum()
    (slope,) = torch.autograd.grad(loss, change)
    assert_close(slope, 2 * gain[:, None] * direction / 6)
    assert_close(slope[0], slope[1])
    change = 0.1 * clean.clone().requires_grad_()
    same = simple_policy_loss(change, direction, torch.zeros(2, dtype=torch.float64), 0.03).sum()
    assert torch.autograd.grad(same, change)[0].abs().max() == 0


def test_directions_times_gains_are_the_gradient_of_a_linear_reward():
    slope = tensor([1.0, -2.0, 0.5, 0.0], dtype=torch.float64)
    draw = torch.Generator().manual_seed(1)
    clean = 0.1 * torch.randn(200_000, 4, generator=draw, dtype=torch.float64)
    gain = (clean @ slope).unflatten(0, (-1, 2))
    gain = (gain - gain.mean(1, keepdim=True)).flatten()
    assert_close((gain[:, None] * pair_contrast(clean)).mean(0), slope, atol=0.02, rtol=0.0)


def test_a_churned_step_is_a_step_of_cps():
    """The published churn: Euler to r, a scale and noise, for any step."""
    gamma, sigmas = 0.0025, tensor([0.8, 0.6, 0.0], dtype=torch.float64)
    eta = tensor([2 / pi * acos(1 / (1 + gamma))], dtype=torch.float64)
    assert float(eta) == pytest.approx(0.045, abs=5e-4)
    s = sigmas[1]
    r = s / (1 + gamma - gamma * s)
    c1, std = CPS().coefficients(sigmas, 0, eta)
    assert_close(c1, (r / (1 + gamma * r)).reshape(1))
    assert_close(std, (r * ((1 + gamma) ** 2 - 1) ** 0.5 / (1 + gamma * r)).reshape(1))


PAIRS = {"samples_per_prompt": 2, "seeds_per_prompt": 1, "sde_window": AllButLast()}
SAMPLER = PAIRS | {"eta": 0.3, "kernel": CPS()}


def data(tmp_path, **changes):
    advantages = {"scale": "none", "clip": None}
    return groups(tmp_path, SAMPLER | changes, advantages, contrast=True)


def settings(source, **changes):
    times = SamplerGrid(num_steps=4, distinct=True)
    own = {"loss": FDFO(), "times": times, "states": VisitedStates(), "old": Average()}
    return Matching(data=source, times_per_sample=4, **own | changes)


def test_all_visited_states_of_both_samples_are_matched(tmp_path):
    learner = new_learner(PixelPolicy(seed=1))
    batch = batch_of(opened(data(tmp_path), learner))
    visited, examples = batch.visited, batch.examples
    start = visited.state(0)
    assert torch.equal(start[0::2], start[1::2])
    assert not torch.equal(visited.state(1)[0::2], visited.state(1)[1::2])
    assert_close(examples["advantage"][0::2], -examples["advantage"][1::2])
    assert_close(examples["contrast"], pair_contrast(visited.state(4)))
    cfg = settings(data(tmp_path))
    part = noise_for(cfg, learner.policy, examples, 0, (0, 0, 0), visited=visited).all()
    matched = cfg.states.build(part, learner.policy, None)
    step = ((1 - matched["sigma"]) * 4).round().int()
    wanted = torch.stack([visited.state(int(k))[i // 4] for i, k in enumerate(step)])
    assert_close(matched["x"], wanted, atol=1e-5, rtol=1e-5)
    assert sorted(step.tolist()) == sorted([0, 1, 2, 3] * 6)


def test_training_raises_the_reward(tmp_path):
    learner = new_learner(PixelPolicy(seed=1), learning_rate=0.02)
    source = data(tmp_path)
    cfg = settings(source)
    cfg.check(context(learner.policy))
    cfg.old.follow(learner, "old")
    stream = source.open(learner, StreamContext(new_rewards(), 0))
    history = train(cfg, learner, stream, 25)
    rewards = [row["reward_mean"] for row in history]
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.1


def test_groups_that_are_no_pairs_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"samples_per_prompt to 2, seeds_per_prompt to 1"):
        data(tmp_path, samples_per_prompt=4)
    with pytest.raises(ValueError, match=r"set tail_ratio to null"):
        data(tmp_path, tail_ratio=0.5)
