"""Spans in the loop: of one step they are GRPO to the bit, of more the clip acts on the product."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from flowalign.extra import SpanGRPO
from flowalign.extra.span_grpo import span_log_density
from flowalign.functional.surrogate import ppo_clip
from flowalign.functional.transition import CPS, FlowSDE, log_density, transition
from flowalign.losses import GRPO, PPOClip
from flowalign.sampling import Comb, Fixed
from flowalign.training.policy_gradient.batches import join_spans, minibatches
from flowalign.training.policy_gradient.policy_gradient_loop import replay_drift, update
from flowalign.types import CreditEstimator, StepCredit, step_of, steps_of
from flowalign.types.trajectory import prompt_step_ids
from tests.fixtures.credited import judged
from tests.fixtures.training import ALONE, flat, new_learner, new_recipe, train, trained_policy

THREE = ["a", "bb", "ccc"]


@dataclass(frozen=True)
class Own(CreditEstimator):
    """Every step of every sample earns something else."""

    def __call__(self, trajectory, values):
        final = values([trajectory.num_steps])
        drawn = torch.Generator().manual_seed(3)
        value = torch.randn(len(final), 4, 1, generator=drawn) ** 3
        value = value.expand(-1, -1, final.shape[-1])
        return StepCredit(value, prompt_step_ids(trajectory), trajectory.trained)


def made(algorithm, learner=None, **recipe):
    learner = learner or new_learner(trained_policy(3, std=0.3))
    cfg = new_recipe(algorithm=algorithm, credit=Own(), **recipe)
    return learner, cfg, judged(cfg, learner)[0]


@pytest.mark.parametrize("changes", [{}, {"updates_per_step": 3, "epochs_per_step": 2}])
def test_spans_of_one_step_are_grpo_to_the_bit(changes):
    """Weights after three steps, and everything logged; step weights and a clip that binds."""
    single, whole = new_learner(trained_policy(3, std=0.3)), new_learner(trained_policy(3, std=0.3))
    rule = {"step_weight": [0.5, 1.0, 2.0, 0.0], "micro_batch": 5, "credit": Own()} | changes
    wanted = train(new_recipe(algorithm=GRPO(PPOClip(0.01)), **rule), single, steps=3)
    algorithm = SpanGRPO(span_steps=1, clip_range=0.01)
    found = train(new_recipe(algorithm=algorithm, **rule), whole, steps=3)
    assert torch.equal(flat(single.policy.denoiser), flat(whole.policy.denoiser))
    timed = ("timing/", "throughput")
    for ours, theirs in zip(found, wanted, strict=True):
        kept = {name: value for name, value in ours.items() if not name.startswith(timed)}
        assert kept == {name: value for name, value in theirs.items() if not name.startswith(timed)}
    assert changes == {} or wanted[-1]["clip_frac_high"] > 0


@pytest.mark.parametrize("micro_batch", [1, 5, 64])
def test_the_update_is_the_gradient_of_the_mean_over_spans(micro_batch):
    """Steps 0 and 1 are one span, step 2 is another; weights and advantages are averaged."""
    rule = {"step_weight": [0.5, 1.5, 3.0, 0.0], "micro_batch": micro_batch}
    learner, cfg, batch = made(SpanGRPO(span_steps=2, clip_range=0.2), **rule)
    _, _, single = made(GRPO(PPOClip(0.2)), **rule)
    trajectory, policy = batch.trajectory, learner.policy
    total = torch.zeros(())
    for steps in ([0, 1], [2]):
        states = [trajectory.state(k) for k in (*steps, steps[-1] + 1)]
        cond = {"length": trajectory.cond["length"].repeat_interleave(4, 0)}
        velocities = [
            policy.velocity(trajectory.state(k), trajectory.sigmas[k], cond) for k in steps
        ]
        etas = [trajectory.eta[:, k] for k in steps]
        kernel, sigmas = trajectory.kernel, trajectory.sigmas
        density = span_log_density(kernel, states, velocities, sigmas, steps[0], etas)
        log_ratio = density - trajectory.logp[:, steps].sum(1)
        each = ppo_clip(log_ratio, single.advantage[:, steps].mean(1), 0.2)
        total = total + single.weight[steps].mean() * each.sum() / 24
    wanted = torch.autograd.grad(total, learner.parameters)
    learner.step = dict
    update(cfg, learner, batch, 0, 0)
    for p, theirs in zip(learner.parameters, wanted, strict=True):
        torch.testing.assert_close(p.grad, theirs, atol=1e-7, rtol=1e-4)
    assert max(float(g.abs().max()) for g in wanted) > 1e-4


def test_the_clip_acts_on_the_product_of_ratios():
    """No single ratio leaves the clip range, the product of three does: nothing is learned."""
    learner, _, batch = made(SpanGRPO(span_steps=3, clip_range=0.2))
    (part,) = minibatches(batch, torch.arange(12), 64)
    assert [step_of(step) for step in steps_of(part)] == [0, 1, 2]
    ones = torch.ones_like(part["advantage"])
    moved = part.with_columns(logp_old=part["logp_old"] - 0.1, advantage=ones)
    fields = batch.fields(learner.policy, learner.reference)
    loss, stats = SpanGRPO(clip_range=0.2).loss(fields, moved)
    assert stats["ratio_mean"] == pytest.approx(2.718281828**0.3, rel=1e-4)
    assert stats["clip_frac_high"] == 1
    assert not any(g.any() for g in torch.autograd.grad(loss, learner.parameters))
    loss, stats = SpanGRPO(clip_range=0.2).loss(fields, steps_of(moved)[0])
    assert stats["clip_frac_high"] == 0
    assert any(g.any() for g in torch.autograd.grad(loss, learner.parameters))


def test_a_sample_with_an_untrained_step_in_a_span_is_left_out_of_that_span():
    _, _, batch = made(GRPO(PPOClip(0.2)))
    mask = batch.mask.clone()
    mask[4, 1], mask[7, 2] = False, False
    joined = join_spans(batch.with_samples(mask=mask), 2, ALONE)
    assert joined.steps["span"].tolist() == [0, 0, 2, -1]
    assert joined.mask.sum(0).tolist() == [11, 0, 11, 0]
    assert not joined.mask[4, 0]
    assert not joined.mask[7, 2]
    assert torch.equal(joined.mask, joined.global_mask)


def test_a_drift_in_the_middle_of_a_span_is_found():
    """The replay check looks at every step of a span, and names the one that does not replay."""
    learner, _, batch = made(SpanGRPO(span_steps=3))
    assert replay_drift(learner.policy, batch, 5).keys() == {0, 1, 2}
    logp = batch.trajectory.logp.clone()
    logp[3, 1] += 0.5
    leaky = replace(batch, trajectory=replace(batch.trajectory, logp=logp))
    drift = replay_drift(learner.policy, leaky, 5)
    assert max(drift, key=lambda k: drift[k]) == 1


@pytest.mark.slow
def test_a_run_of_spans_learns_and_no_check_fires():
    cfg = new_recipe(
        {"num_steps": 6, "sde_window": Fixed(0, 5)}, algorithm=SpanGRPO(clip_range=0.2)
    )
    learner = new_learner(learning_rate=3e-2)
    metrics = train(cfg, learner, steps=30)
    assert metrics[-1]["reward/redness"] > metrics[0]["reward/redness"] + 0.1
    assert {f"check/ratio_drift_{k}" for k in range(5)} <= metrics[0].keys()


def test_samples_that_share_their_noise_cannot_form_spans():
    with pytest.raises(ValueError, match="spans need the same stochastic steps"):
        new_recipe({"branching": Comb(children=2), "samples_per_prompt": 6}, algorithm=SpanGRPO())


def test_measured_weights_of_steps_and_spans_exclude_each_other():
    with pytest.raises(ValueError, match="measured for single steps, SpanGRPO"):
        new_recipe(algorithm=SpanGRPO(), step_weight="measured", prompts_per_step=4)


# Log-densities of spans: by hand, and against finite differences in double precision --------------


SIGMAS = torch.tensor([1.0, 0.8, 0.5, 0.3, 0.0], dtype=torch.float64)


def test_two_steps_by_hand():
    """DanceSDE-like numbers on one element: each mean is a x + b v, the second x carries the first.

    With CPS at eta 1 there is no predicted noise: mean = (1 - s') (x - s v), std = s', and the
    "unit" density is -(x' - mean)^2. From s = .8 to .5 and .3: with x = 2, v = 1, x' = 1, v' = 3,
    x'' = -.4 the means are .5 * 1.2 = .6 and .7 * (1 - 1.5) = -.35. Slopes in v are -.5 * .8 = -.4,
    and -.7 * .5 = -.35 in v'; x' adds .7 * -.4 = -.28 to the second mean.
    """
    one = torch.ones(1, dtype=torch.float64)
    states = [value * one[:, None] for value in (2.0, 1.0, -0.4)]
    velocities = [(value * one[:, None]).requires_grad_() for value in (1.0, 3.0)]
    found = span_log_density(CPS(), states, velocities, SIGMAS, 1, [one, one])
    assert_close(found, -(0.4**2 + 0.05**2) * one)
    first, second = torch.autograd.grad(found.sum(), velocities)
    assert_close(first, one[:, None] * (2 * 0.4 * -0.4 + 2 * -0.05 * -0.28))
    assert_close(second, one[:, None] * (2 * -0.05 * -0.35))


def test_one_step_is_the_density_of_the_transition_to_the_bit():
    drawn = torch.Generator().manual_seed(2)
    x, v, after = (torch.randn(3, 2, 4, generator=drawn) for _ in range(3))
    eta, sigmas = torch.tensor([0.2, 0.7, 1.1]), SIGMAS.float()
    plain = log_density(FlowSDE(), after, transition(FlowSDE(), x, v, sigmas, 2, eta))
    assert torch.equal(span_log_density(FlowSDE(), [x, after], [v], sigmas, 2, [eta]), plain)


def test_a_deterministic_step_adds_nothing_but_is_differentiated_through():
    """Its density is 0, yet its velocity moves the state that the next, noisy step leaves."""
    drawn = torch.Generator().manual_seed(5)
    states = [torch.randn(1, 3, generator=drawn, dtype=torch.float64) for _ in range(3)]
    velocities = [torch.randn(1, 3, dtype=torch.float64).requires_grad_() for _ in range(2)]
    etas = [torch.zeros(1).double(), torch.ones(1).double()]
    found = span_log_density(FlowSDE(), states, velocities, SIGMAS, 1, etas)
    second = transition(FlowSDE(), states[1], velocities[1], SIGMAS, 2, etas[1])
    assert_close(found, log_density(FlowSDE(), states[2], second))
    assert torch.autograd.grad(found.sum(), velocities[0])[0].abs().min() > 1e-3


class TinyPolicy(nn.Module):
    """A velocity of four elements in double precision."""

    def __init__(self):
        super().__init__()
        drawn = torch.Generator().manual_seed(1)
        self.w = nn.Parameter(torch.randn(4, 5, generator=drawn, dtype=torch.float64) / 2)

    def forward(self, x, sigma):
        return torch.cat([x, sigma.expand(len(x), 1)], 1).tanh() @ self.w.T


@pytest.mark.parametrize("kernel", [FlowSDE(), CPS()], ids=lambda k: type(k).__name__)
@pytest.mark.parametrize("clip", [0.5, 1e-3])
def test_the_gradient_is_that_of_finite_differences(kernel, clip):
    """Finite differences of the clipped ratio of three steps, sampled again with equal noise.

    Sampling again with changed weights moves the latents of the span: x_{k+1} = x_{k+1}^old + mean
    - mean^old. As in CogniEdit, the network's inputs stay fixed, and so do the states at which the
    density is evaluated.
    """
    policy, drawn = TinyPolicy(), torch.Generator().manual_seed(3)
    states = [torch.randn(2, 4, generator=drawn, dtype=torch.float64) for _ in range(4)]
    eta = torch.tensor([0.4, 0.9], dtype=torch.float64)
    advantage = torch.tensor([1.3, -0.7], dtype=torch.float64)
    logp_old = span_log_density(kernel, states, seen(policy, states), SIGMAS, 1, [eta] * 3).detach()
    old_means = means(kernel, policy, states, [s.clone() for s in states], eta)

    def objective():
        moved, total = states[0], 0.0
        for i, v in enumerate(seen(policy, states)):
            step = transition(kernel, moved, v, SIGMAS, 1 + i, eta)
            total = total + log_density(kernel, states[i + 1], step)
            moved = states[i + 1] + step.mean - old_means[i]
        return ppo_clip(total - logp_old, advantage, clip).mean()

    density = span_log_density(kernel, states, seen(policy, states), SIGMAS, 1, [eta] * 3)
    loss = ppo_clip(density - logp_old, advantage, clip).mean()
    (ours,) = torch.autograd.grad(loss, [policy.w])
    numeric, step = torch.zeros_like(ours), 1e-6
    with torch.no_grad():
        for place in range(ours.numel()):
            ends = []
            for sign in (1, -1):
                policy.w.view(-1)[place] += sign * step
                ends.append(objective())
                policy.w.view(-1)[place] -= sign * step
            numeric.view(-1)[place] = (ends[0] - ends[1]) / (2 * step)
    assert_close(ours, numeric, rtol=1e-6, atol=1e-8)
    assert ours.abs().max() > 1e-2


def seen(policy, states):
    """Velocities at the states of the rollout, which have no gradient."""
    return [policy(x, SIGMAS[1 + i]) for i, x in enumerate(states[:-1])]


def means(kernel, policy, states, at, eta):
    """Means of the old policy's steps."""
    found = [
        transition(kernel, x, v, SIGMAS, 1 + i, eta).mean
        for i, (x, v) in enumerate(zip(at, seen(policy, states), strict=False))
    ]
    return [mean.detach() for mean in found]
