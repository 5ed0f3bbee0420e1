"""Policy objectives against arithmetic by hand, torch.distributions, recordings and identities."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from flowalign.functional.surrogate import (
    chunk_log_ratio,
    chunks_of_change,
    chunks_of_sizes,
    divergence_mask,
    find_spans,
    gaussian_kl,
    gaussian_kl_no_dt,
    latent_change,
    latent_mse,
    log_hinge,
    ppo_clip,
    ratio_norm,
    reward_clip,
)
from flowalign.functional.transition import (
    FlowSDE,
    Gaussian,
    log_density,
    mean_sensitivity,
    sample_next,
    transition,
)
from tests.fixtures.golden import load

quick = settings(max_examples=50, deadline=None, database=None)


def randn(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


# By hand ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.5, 2.0, -2.4, 0.0),  # good and already above the range: 1.2 * 2
        (1.5, -2.0, 3.0, 3.0),  # bad and above: no clip, slope -A r
        (0.5, 2.0, -1.0, -1.0),  # good and below: no clip
        (0.5, -2.0, 1.6, 0.0),  # bad and already below: .8 * 2
        (1.1, -3.0, 3.3, 3.3),
        (0.9, 4.0, -3.6, -3.6),
    ],
)
def test_ppo_clip_by_hand(ratio, advantage, loss, slope):
    log_ratio = torch.tensor([ratio]).log().requires_grad_()
    got = ppo_clip(log_ratio, torch.tensor([advantage]), clip=0.2)
    assert_close(got, torch.tensor([loss]))
    assert_close(torch.autograd.grad(got.sum(), log_ratio)[0], torch.tensor([slope]))


def test_ratio_norm_by_hand():
    """.5 (-.2 + .05 / .5) = -.05 and 2 (.3 + 4 / 8) = 1.6."""
    mean = torch.tensor([[1.1, 2.3], [0.0, 0.0]])
    mean_old = torch.tensor([[1.0, 2.0], [2.0, -2.0]])
    got = ratio_norm(torch.tensor([-0.2, 0.3]), mean, mean_old, torch.tensor([0.5, 2.0]))
    assert_close(got, torch.tensor([-0.05, 1.6]))


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss", "slope"),
    [
        (0.05, 2.0, 0.1, -2.0),  # .2 - .1
        (0.15, 2.0, 0.0, 0.0),  # moved far enough
        (-0.15, 2.0, 0.5, -2.0),  # the wrong way: no limit
        (0.05, -3.0, 0.45, 3.0),  # .3 + .15
        (-0.15, -3.0, 0.0, 0.0),
    ],
)
def test_log_hinge_by_hand(log_ratio, advantage, loss, slope):
    x = torch.tensor([log_ratio], requires_grad=True)
    got = log_hinge(x, torch.tensor([advantage]), margin=0.1)
    assert_close(got, torch.tensor([loss]))
    assert_close(torch.autograd.grad(got.sum(), x)[0], torch.tensor([slope]))


def test_a_range_for_each_sample_clips_each_at_its_own():
    """1.5 * 2 at most 1.4 * 2 and 1.2 * 2; .5 * -3 at most .9 * -3."""
    log_ratio = torch.tensor([1.5, 1.5, 0.5]).log()
    advantage = torch.tensor([2.0, 2.0, -3.0])
    got = ppo_clip(log_ratio, advantage, torch.tensor([0.4, 0.2, 0.1]))
    assert_close(got, torch.tensor([-2.8, -2.4, 2.7]))


def test_reward_clip_by_hand():
    """tanh(ln 2) = .6 and tanh(ln 3) = .8: .1 + .4 * .6 and .1 + .4 * .8."""
    advantage = torch.tensor([2.0, -3.0, 1.0]).abs().log() / 2 * torch.tensor([1, -1, 1])
    got = reward_clip(advantage, low=0.1, high=0.5, sensitivity=2.0)
    assert_close(got, torch.tensor([0.34, 0.42, 0.1]))
    assert_close(reward_clip(torch.tensor([-50.0]), 0.1, 0.5, 2.0), torch.tensor([0.5]))


def test_divergence_mask_stops_only_far_samples_that_would_move_further():
    cases = [  # log ratio, advantage, divergence, kept
        (0.1, 1.0, 0.02, False),
        (-0.1, -1.0, 0.02, False),
        (0.1, -1.0, 0.02, True),
        (-0.1, 1.0, 0.02, True),
        (0.1, 1.0, 0.005, True),
        (-0.1, -1.0, 0.005, True),
        (0.1, 1.0, 0.01, False),  # the threshold itself is far
        (0.0, 1.0, 0.02, True),  # no direction yet
        (0.1, 0.0, 0.02, True),
        (-0.1, 0.0, 0.02, True),
    ]
    log_ratio, advantage, divergence, kept = zip(*cases, strict=True)
    got = divergence_mask(*(torch.tensor(t) for t in (log_ratio, advantage, divergence)), 0.01)
    assert got.tolist() == list(kept)


def test_divergences_by_hand():
    """Mean squares .05 and 4: KL .05 / .5 and 4 / 8, without dt times .3."""
    p = Gaussian(torch.tensor([[1.1, 2.3], [0.0, 0.0]]), torch.tensor([0.5, 2.0]))
    q = Gaussian(torch.tensor([[1.0, 2.0], [2.0, -2.0]]), torch.tensor([0.5, 2.0]))
    assert_close(gaussian_kl(p, q), torch.tensor([0.1, 0.5]))
    assert_close(gaussian_kl_no_dt(p, q, torch.tensor(0.3)), torch.tensor([0.03, 0.15]))
    assert_close(latent_mse(p, q), torch.tensor([0.05, 4.0]))


def test_gaussian_kl_matches_torch_distributions():
    std = torch.tensor([0.4, 1.7, 0.03], dtype=torch.float64)
    p, q = (Gaussian(randn(3, 2, 5, seed=seed), std) for seed in (1, 2))
    exact = torch.distributions.kl_divergence(
        *(torch.distributions.Normal(d.mean, d.std[:, None, None]) for d in (p, q))
    )
    assert_close(gaussian_kl(p, q), exact.mean((1, 2)))


# Identities ---------------------------------------------------------------------------------------


@quick
@given(
    log_ratio=st.floats(-1, 1),
    advantage=st.floats(-5, 5),
    clip=st.floats(1e-3, 0.5),
)
def test_ppo_clip_is_odd_in_the_advantage_inside_the_trust_region_only(log_ratio, advantage, clip):
    """Outside, the pessimism of the minimum adds |A| times the distance of r from the range."""
    x, a = (torch.tensor([t], dtype=torch.float64) for t in (log_ratio, advantage))
    ratio = x.exp()
    outside = (ratio - ratio.clamp(1 - clip, 1 + clip)).abs()
    assert_close(ppo_clip(x, a, clip) + ppo_clip(x, -a, clip), a.abs() * outside)


def test_the_policy_gradient_at_ratio_one_is_minus_the_advantage():
    advantage = torch.tensor([1.5, -0.4, 0.0])
    for loss in (lambda x: ppo_clip(x, advantage, 1e-4), lambda x: log_hinge(x, advantage, 1e-4)):
        x = torch.zeros(3, requires_grad=True)
        (slope,) = torch.autograd.grad(loss(x).sum(), x)
        assert_close(slope[:2], -advantage[:2])


def test_ratio_norm_leaves_only_the_noise_term():
    """-mean((mean_old - mean) noise) for any std: unbiased, with one scale at every step."""
    std = torch.tensor([0.02, 0.5, 3.0], dtype=torch.float64)
    mean_old, noise = randn(3, 4, seed=3), randn(3, 4, seed=4)
    mean = mean_old + 0.3 * randn(3, 4, seed=5)
    old, new = Gaussian(mean_old, std), Gaussian(mean, std)
    x_next = sample_next(old, noise)
    log_ratio = log_density(FlowSDE(), x_next, new) - log_density(FlowSDE(), x_next, old)
    got = ratio_norm(log_ratio, mean, mean_old, std)
    assert_close(got, -((mean_old - mean) * noise).mean(1))


# Recordings ---------------------------------------------------------------------------------------

Objective = Callable[["Step"], Tensor]


class Step:
    """One recorded Flow-SDE step k of the policy-loss recording, replayed by us."""

    def __init__(self, g: dict[str, Tensor], row: int):
        self.sigmas, self.k = g["sigmas"], int(g["steps"][row])
        self.dt = self.sigmas[self.k] - self.sigmas[self.k + 1]
        self.eta = g["noise_level"].expand(4)
        self.raw_advantage = g["advantages"][row]
        self.advantage = self.raw_advantage.clamp(-5, 5)
        self.v = g["v"][row].clone().requires_grad_()
        self.new, self.old, self.reference = (
            transition(FlowSDE(), g["x"][row], v, self.sigmas, self.k, self.eta)
            for v in (self.v, g["v_old"][row], g["v_ref"][row])
        )
        self.logp = log_density(FlowSDE(), g["next"][row], self.new)
        self.log_ratio = self.logp - g["logp_old"][row]
        self.log_ratio_norm = ratio_norm(self.log_ratio, self.new.mean, self.old.mean, self.new.std)
        self.kappa = mean_sensitivity(FlowSDE(), self.sigmas, self.k, self.eta)

    def clipped(self, clip: float) -> Tensor:
        return ppo_clip(self.log_ratio, self.advantage, clip)

    def guarded(self, clip: float) -> Tensor:
        return ppo_clip(self.log_ratio_norm, self.advantage, clip)

    def dppo_mask(self, threshold: float) -> Tensor:
        divergence = gaussian_kl(self.new, self.old)
        return divergence_mask(self.log_ratio, self.raw_advantage, divergence, threshold)

    def masked(self, threshold: float) -> Tensor:
        return -self.log_ratio.exp() * self.raw_advantage * self.dppo_mask(threshold)

    def kl_no_dt(self) -> Tensor:
        return gaussian_kl_no_dt(self.new, self.reference, self.dt)


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load("B_policy_losses")


@pytest.fixture
def steps(golden: dict[str, Tensor]) -> list[Step]:
    """First, a middle and the last trained step (k = 0, 3, 8); one advantage is above 5."""
    return [Step(golden, row) for row in range(3)]


# The flow_grpo GRPO-Guard script averages the bias over the batch by mistake: not a target.
OBJECTIVES: dict[str, Objective] = {
    "flow_grpo.clip0.0001.beta0": lambda s: s.clipped(1e-4),
    "flow_grpo.clip0.01.beta0": lambda s: s.clipped(1e-2),
    "flow_grpo.clip0.0001.beta0.04": lambda s: s.clipped(1e-4) + 0.04 * s.kl_no_dt(),
    "flow_grpo.clip0.01.beta0.04": lambda s: s.clipped(1e-2) + 0.04 * s.kl_no_dt(),
    "verl_flow_grpo": lambda s: s.clipped(1e-4),
    "dance": lambda s: s.clipped(1e-4),
    "tempflow": lambda s: 2.25 * s.new.std * s.clipped(1e-4),
    "kl.verl_no_dt": lambda s: s.kl_no_dt(),
    "kl.exact_with_dt": lambda s: gaussian_kl(s.new, s.reference),
    "kl.precise_latent_mse": lambda s: latent_mse(s.new, s.reference),
    "guard_verl.clip2e-06": lambda s: s.guarded(2e-6) / s.dt,
    "guard_verl.clip0.001": lambda s: s.guarded(1e-3) / s.dt,
    "guard_precise.clip2e-06": lambda s: s.guarded(2e-6) / s.kappa.abs(),
    "guard_precise.clip0.001": lambda s: s.guarded(1e-3) / s.kappa.abs(),
    "guard_flow_factory.clip2e-06": lambda s: s.guarded(2e-6),
    "guard_flow_factory.clip0.001": lambda s: s.guarded(1e-3),
    "dppo_verl.tau1e-05": lambda s: s.masked(1e-5),
    "dppo_verl.tau0.001": lambda s: s.masked(1e-3),
    "dppo_unirl.tau1e-05": lambda s: s.masked(1e-5),
    "dppo_unirl.tau0.001": lambda s: s.masked(1e-3),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_and_gradient_match_the_recording(name, golden, steps):
    rtol = 2e-4 if name.startswith("guard") else 1e-5
    # The exact KL divides the difference of close means by a small std^2.
    grad_atol = 1e-8 if name == "kl.exact_with_dt" else 1e-9
    for row, step in enumerate(steps):
        loss = OBJECTIVES[name](step).mean()
        assert_close(loss, golden[f"{name}.loss"][row], rtol=rtol, atol=1e-9)
        (grad,) = torch.autograd.grad(loss, step.v)
        assert_close(grad, golden[f"{name}.grad_v"][row], rtol=5e-4, atol=grad_atol)


def test_mixgrpo_is_the_clipped_loss_plus_its_own_penalty(golden, steps):
    """Its "KL" is half the squared log-ratio to the old policy, which we do not offer."""
    for row, step in enumerate(steps):
        loss = step.clipped(1e-4).mean()
        (grad,) = torch.autograd.grad(loss, step.v)
        for ours, key, rtol in ((loss, "loss", 1e-5), (grad, "grad_v", 5e-4)):
            penalty = golden[f"kl.mixgrpo_half_sq_logratio.{key}"][row]
            assert_close(ours + penalty, golden[f"mixgrpo.{key}"][row], rtol=rtol, atol=1e-9)


def test_ratios_match_the_recording(golden, steps):
    for row, step in enumerate(steps):
        ratio, norm = step.log_ratio.exp(), step.log_ratio_norm.exp()
        assert_close(ratio, golden["flow_grpo.clip0.01.beta0.ratio"][row], atol=1e-6, rtol=0)
        assert_close(norm, golden["guard_precise.clip0.001.ratio"][row], atol=1e-6, rtol=0)


def test_divergences_match_the_recording(golden, steps):
    for row, step in enumerate(steps):
        kl = step.kl_no_dt().mean()
        assert_close(kl, golden["flow_grpo.clip0.01.beta0.04.kl"][row], rtol=1e-4, atol=1e-10)
        to_old = gaussian_kl(step.new, step.old).max()
        assert_close(to_old, golden["dppo_verl.tau0.001.kl_max"][row], rtol=1e-4, atol=1e-10)


@pytest.mark.parametrize("tau", ["1e-05", "0.001"])
def test_flow_dppo_masks_the_recorded_samples(tau, golden, steps):
    for row, step in enumerate(steps):
        share = (~step.dppo_mask(float(tau))).float().mean()
        assert share == golden[f"dppo_verl.tau{tau}.masked_fraction"][row]
        per_sample = golden[f"dppo_unirl.tau{tau}.per_elem"][row]
        assert_close(step.masked(float(tau)), per_sample, rtol=1e-5, atol=1e-9)


# Ratios of chunks against arithmetic by hand and autograd through their product -------------------


def test_the_ratio_of_a_chunk_by_hand():
    """Ratios 1.2, .9, 1.1 and one alone: (1.2 * .9 * 1.1)^(1/3) = 1.188^(1/3)."""
    ratio = torch.tensor([1.2, 0.9, 1.1, 0.7])
    others = torch.tensor([0.9 * 1.1, 1.2 * 1.1, 1.2 * 0.9, 1.0]).log()
    got = chunk_log_ratio(ratio.log(), others, torch.tensor([3, 3, 3, 1])).exp()
    assert_close(got, torch.tensor([1.188 ** (1 / 3)] * 3 + [0.7]))


@pytest.mark.parametrize("surrogate", [ppo_clip, log_hinge])
def test_gradients_summed_over_a_chunk_are_those_of_its_loss(surrogate):
    """Through the product of all ratios, for chunks inside and outside the trust region."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(6, 3, 4, generator=generator, dtype=torch.float64)
    advantage = torch.randn(6, generator=generator, dtype=torch.float64)
    weights = 0.1 * torch.randn(4, generator=generator, dtype=torch.float64)
    weights.requires_grad_()

    log_ratio = (features @ weights).tanh()
    whole = surrogate(log_ratio.exp().prod(1).log() / 3, advantage, 0.05).sum()
    (wanted,) = torch.autograd.grad(whole, weights)

    got = torch.zeros(4, dtype=torch.float64)
    for t in range(3):
        own = (features[:, t] @ weights).tanh()
        others = (log_ratio.sum(1) - log_ratio[:, t]).detach()
        joined = chunk_log_ratio(own, others, torch.full((6,), 3))
        assert_close(surrogate(joined, advantage, 0.05).sum(), whole)
        got += torch.autograd.grad(surrogate(joined, advantage, 0.05).sum(), weights)[0]
    assert_close(got, wanted)
    mean = log_ratio.mean(1).exp()
    assert ((mean > 1.05) & (advantage > 0) | (mean < 0.95) & (advantage < 0)).any()
    assert wanted.abs().max() > 1e-3


def test_steps_left_over_stand_alone():
    assert chunks_of_sizes([2, 3], 7).tolist() == [0, 0, 1, 1, 1, 2, 3]
    with pytest.raises(ValueError, match=r"chunk_sizes \[2, 3\] cover 5 steps; there are 4"):
        chunks_of_sizes([2, 3], 4)


def test_the_relative_change_of_a_latent_by_hand():
    """|(1, -3)| = 4 to (2, -3): 1 / 4; from there, 5, to (2, 1): 4 / 5."""
    states = torch.tensor([[[1.0, -3.0], [2.0, -3.0], [2.0, 1.0]]])
    assert_close(latent_change(states), torch.tensor([[0.25, 0.8]]))


@pytest.mark.parametrize(
    ("change", "chunks"),
    [
        ([5, 3, 1, 2, 4], [0, 0, 0, 1, 1]),  # falls, then rises: 1 ends a chunk
        ([1, 2, 3, 2, 1, 2], [0, 0, 0, 1, 1, 2]),
        ([4, 3, 2, 1], [0, 0, 0, 0]),
        ([1, 3, 2, 4], [0, 0, 1, 2]),
        ([2, 1], [0, 0]),
        ([7], [0]),
    ],
)
def test_a_chunk_ends_where_the_change_turns(change, chunks):
    assert chunks_of_change(torch.tensor(change, dtype=torch.float)).tolist() == chunks


def test_a_chunk_of_one_is_a_step():
    log_ratio = torch.tensor([0.3, -math.log(2)])
    assert torch.equal(
        chunk_log_ratio(log_ratio, torch.zeros(2), torch.ones(2, dtype=torch.long)), log_ratio
    )


# Spans of the trained steps of a rollout ----------------------------------------------------------


@pytest.mark.parametrize(
    ("trained", "longest", "spans"),
    [
        ([0, 1, 2, 3, 4], 2, [[0, 1], [2, 3], [4]]),
        ([1, 2, 5, 6, 7], 3, [[1, 2], [5, 6, 7]]),
        ([3, 4], 1, [[3], [4]]),
        ([], 4, []),
    ],
)
def test_spans_are_runs_of_consecutive_steps(trained, longest, spans):
    assert find_spans(trained, longest) == spans
