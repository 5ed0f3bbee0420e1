"""Points off the way of the data: arithmetic by hand, and the numbers of SOAR's own code."""

import pytest
import torch
from torch import Tensor, tensor
from torch.testing import assert_close

from flowalign.functional.noise_matching import (
    add_noise,
    level_after,
    point_weights,
    renoise,
    velocity_to_data,
)
from flowalign.losses.matching.sft import SFT
from flowalign.training.matching.residuals import matching_residuals
from flowalign.training.matching.state_source import GuidedStep
from flowalign.types import Batch, VelocityField
from tests.fixtures.golden import load, tiny_velocity
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.preference import recipe


def test_a_level_later_is_found_between_the_levels_of_the_schedule():
    sigmas = tensor([1.0, 0.9, 0.6, 0.0])
    # A third of the schedule is one step: from a level to the next, and likewise between them.
    sigma = tensor([1.0, 0.9, 0.75, 0.6, 0.3])
    assert_close(level_after(sigmas, sigma, 1 / 3), tensor([0.9, 0.6, 0.3, 0.0, 0.0]))
    assert_close(level_after(sigmas, tensor([0.95]), 0.5), tensor([0.6]))


def test_renoising_by_the_noise_of_a_state_is_noising_it_further():
    data, noise = tensor([[1.0, -2.0]]), tensor([[0.5, 3.0]])
    x = add_noise(data, noise, tensor([0.2]))
    assert_close(
        renoise(x, noise, tensor([0.2]), tensor([0.7])), add_noise(data, noise, tensor([0.7]))
    )
    off = renoise(tensor([[2.0, 2.0]]), noise, tensor([0.2]), tensor([0.6]))
    assert_close(off, tensor([[1.25, 2.5]]))  # half way
    assert_close(renoise(x, noise, tensor([1.0]), tensor([1.0])), x)


def test_the_velocity_to_the_data_is_noise_minus_data_on_their_line():
    data, noise = tensor([[1.0, -2.0]]), tensor([[0.5, 3.0]])
    x = add_noise(data, noise, tensor([0.2]))
    assert_close(velocity_to_data(x, data, tensor([0.2])), noise - data)
    assert_close(velocity_to_data(tensor([[2.0, 0.0]]), data, tensor([0.5])), tensor([[2.0, 4.0]]))


def test_weighted_rows_have_the_mean_of_samples_and_points():
    own, each = point_weights(3, 0.5)
    errors = tensor([2.0, 5.0, 7.0, 1.0])  # one sample, three points
    assert float((errors * tensor([own, each, each, each])).mean()) == pytest.approx(
        (2 + 0.5 * 13) / (1 + 0.5 * 3)
    )


# The authors' code --------------------------------------------------------------------------------


class Recorded(PixelPolicy):
    """The network of the recording; at a point it gets the time that their code rounds to."""

    def __init__(self, recorded: dict[str, Tensor], case: str):
        super().__init__()
        self.recorded = {n: v.double() for n, v in recorded.items() if v.is_floating_point()}
        self.weights = {f"policy.{n}": self.recorded[f"policy.{n}"].clone() for n in "WuP"}
        for weight in self.weights.values():
            weight.requires_grad_()
        self.levels = self.recorded[f"{case}.aux_sigma"]
        self.times = self.recorded[f"{case}.aux_timesteps"] / 1000

    def schedule(self, num_steps: int) -> Tensor:
        even = torch.linspace(1, 0.001, num_steps, dtype=torch.float64)  # SD3's, of shift 3
        return torch.cat([3 * even / (1 + 2 * even), even.new_zeros(1)])

    def velocity(self, x, sigma, cond):
        distance, place = (sigma[:, None] - self.levels).abs().min(1)
        time = torch.where(distance < 1e-6, self.times[place], sigma)
        return tiny_velocity(self.weights, "policy", x, time, cond["text"])


class OneStep(VelocityField):
    """The guided velocity of the recording."""

    def __init__(self, velocity: Tensor):
        self.given = velocity.double()

    def velocity(self, x, sigma, cond):
        return self.given


def points_of(case: str, cfg: GuidedStep) -> tuple[Recorded, Batch]:
    """The recorded samples and their points, of levels drawn as they were."""
    recorded = load("F_soar")
    policy = Recorded(recorded, case)
    latents, sigma = recorded["z0"].double(), recorded[f"{case}.sigma0"].double()
    after = level_after(policy.schedule(1000), sigma, 1 / cfg.num_steps)
    levels = recorded[f"{case}.aux_sigma"].double().view(cfg.count, 4)
    drawn = ((levels - after) / (1 - after)).T
    columns = {
        "latents": latents,
        "cond": {"text": recorded["cond"].double()},
        "weight": torch.ones(4).double(),
        "noise": recorded[f"{case}.z1"].double(),
        "sigma": sigma,
        "uniform": drawn,
    }
    part = Batch(columns)
    return policy, cfg.build(part, policy, OneStep(recorded[f"{case}.v_cfg"]))


def test_points_loss_and_gradient_are_those_of_the_authors_code():
    cfg, recorded = GuidedStep(), load("F_soar", "ode6.")
    policy, points = points_of("ode6", cfg)
    assert_close(points["x"][4:].float(), recorded["aux_latents"], atol=1e-5, rtol=1e-5)
    assert_close(points["sigma"][4:].float(), recorded["aux_sigma"])
    settings = recipe(loss=SFT(), states=cfg)
    loss, _ = settings.loss.loss(matching_residuals(settings, policy, points, {}))
    assert float(loss) == pytest.approx(float(recorded["loss_total"]), rel=1e-5)
    loss.backward()
    for name, weight in policy.weights.items():
        assert weight.grad is not None
        assert_close(weight.grad.float(), recorded[f"grad_{name}"], atol=1e-5, rtol=2e-4)


def test_weights_of_points_are_those_of_the_authors_code():
    """Two paths, one of them random. Only the loss is our choice; both have three points of weight
    .5."""
    recorded = load("F_soar", "cps2x3.")
    weight = point_weights(6, 0.5)
    main, aux = recorded["loss_main_sum"], recorded["loss_aux_sum"] / 0.5
    assert_close((weight[0] * main + weight[1] * aux) / 28, recorded["loss_total"])
