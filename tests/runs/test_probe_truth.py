"""Probes of a linear policy with signal and noise known in closed form.

The velocity is a constant theta in R^3 and the reward the first channel minus the third, so x_T is
linear in all noise, and a transition has d logp / d theta = b_k / (3 std_k) noise_k. In a group of
G samples, the sum of A d logp is a quadratic form of centred Gaussians. In each of the two rewarded
channels its mean is +-(G - 1) beta_k, where beta_k is the effect of a unit of noise of step k on
x_T. Its covariance between steps k and l is (G - 1) (beta_k beta_l + [k = l] V) in these channels,
and (G - 1) [k = l] V in the third channel, V being the variance of the reward.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from flowalign.functional.signal import (
    Moments,
    best_weights,
    leave_one_out,
    moments,
    signal_to_noise,
    standard_error,
)
from flowalign.losses.policy_gradient.grpo import GRPO, PPOClip
from flowalign.runs.config import Run
from flowalign.runs.session import open_run
from flowalign.studies.probe.measure import Probe, probe
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.small_run import new_run
from tests.fixtures.training import checked, new_recipe

PROMPTS, GROUP, STEPS = 2, 4, 4


class Constant(nn.Module):
    """The same velocity everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor([0.2, -0.1, 0.3]))

    def forward(self, x: Tensor) -> Tensor:
        return self.theta.expand_as(x)


class LinearPolicy(PixelPolicy):
    """Decodes a latent as it is."""

    def __init__(self) -> None:
        self.denoiser = Constant()

    def velocity(self, x: Tensor, sigma: Tensor, cond: dict[str, Tensor]) -> Tensor:
        return self.denoiser(x)

    def decode(self, x: Tensor) -> Tensor:
        return x[:, None, :, None, None]


def new_linear(folder, seed: int = 0, **recipe) -> Run:
    given = {
        "algorithm": GRPO(PPOClip(1e6)),
        "advantages": {"scale": "none", "clip": 1e6},
        "prompts_per_step": PROMPTS,
    }
    settings = new_recipe({"num_steps": STEPS, "samples_per_prompt": GROUP}, **given | recipe)
    return new_run(folder, settings, policy=LinearPolicy(), seed=seed)


def truth(run: Run) -> Moments:
    """Signal and noise by the formulas above, from the coefficients of the kernel."""
    sampling = run.recipe.sampling
    sigmas = run.policy.schedule(STEPS)
    steps = [
        sampling.kernel.coefficients(sigmas, k, torch.tensor([sampling.eta * (k < STEPS - 1)]))
        for k in range(STEPS)
    ]
    after, sigma = sigmas[1:], sigmas[:-1]
    c1, std = (torch.stack([getattr(step, name)[0] for step in steps]) for name in ("c1", "std"))
    keeps, moves = (1 - after) + c1, c1 * (1 - sigma) - (1 - after) * sigma
    left = torch.stack([keeps[k + 1 :].prod() for k in range(STEPS)])
    beta, trained = (std * left)[:-1].double(), STEPS - 1
    scale = moves[:-1] / (3 * std[:-1]) / (PROMPTS * GROUP * trained)
    variance = 2 * (beta.square().sum() + keeps.prod().double() ** 2)
    pairs = torch.outer(beta, beta) * torch.outer(scale, scale)
    count = PROMPTS * (GROUP - 1)
    alone = torch.diag(3 * variance * scale.double() ** 2)
    return Moments(2 * count**2 * pairs, count * (2 * pairs + alone))


def probed(run: Run, batches: int) -> Probe:
    parts = open_run(run)
    found = probe(run, parts, batches)
    assert found is not None
    return found


def estimates(found: Probe) -> Sequence[tuple[Tensor, Tensor]]:
    """Signal and noise of all pairs of steps, and the signal to noise, with standard errors."""
    products, blocks = found.gradient, len(found.gradient.batches)
    ones = torch.ones(len(found.steps)).double()

    def all_of(kept: Tensor) -> Tensor:
        one = moments(products, kept)
        return torch.cat([*(m.flatten() for m in one), signal_to_noise(one, ones)[None]])

    every = all_of(torch.ones(blocks, dtype=torch.bool))
    return every, standard_error(leave_one_out(all_of, blocks))


def flat_truth(run: Run) -> Tensor:
    found, ones = truth(run), torch.ones(STEPS - 1).double()
    return torch.cat([*(m.flatten() for m in found), signal_to_noise(found, ones)[None]])


@pytest.fixture(scope="module")
def long(tmp_path_factory) -> tuple[Run, Probe]:
    """A probe of 300 batches."""
    run = new_linear(tmp_path_factory.mktemp("linear") / "run")
    (found,) = (probed(run, 300) for _ in checked(0, range(1)))
    return run, found


@pytest.mark.slow
def test_signal_and_noise_are_those_of_the_closed_form(long):
    """All lie within four standard errors, and the ratio is known to a fifth."""
    run, found = long
    values, errors = estimates(found)
    expected = flat_truth(run)
    assert ((values - expected).abs() < 4 * errors).all()
    assert (errors[-1] / expected[-1]) < 0.2
    assert found.gradient.batches.sum() == 300


@pytest.mark.slow
def test_weights_found_are_worth_nearly_as_much_as_those_of_the_closed_form(long):
    """In three dimensions sixteen blocks know the noise to a fifth, and so the weights."""
    run, found = long
    known = truth(run)
    best, chosen = best_weights(known), best_weights(moments(found.gradient))
    worth = [float(signal_to_noise(known, weights)) for weights in (best, chosen)]
    assert 0.75 * worth[0] < worth[1] <= worth[0] * (1 + 1e-9)
