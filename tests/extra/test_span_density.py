"""Log-densities of spans: by hand, and against finite differences in double precision."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from flowalign.extra.span_grpo import span_log_density
from flowalign.functional.surrogate import ppo_clip
from flowalign.functional.transition import CPS, FlowSDE, log_density, transition

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
