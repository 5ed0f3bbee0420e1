"""A diffusion model is a flow in other coordinates, exactly."""

from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler
from torch import Tensor

from flowalign.functional.diffusion import (
    even_times,
    flow_sigmas,
    flow_velocity,
    fractional_time,
    preserving_state,
)
from flowalign.functional.transition import flow_std

BETAS: dict[str, Any] = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
KINDS = ["epsilon", "v_prediction", "sample"]
DDIM: Any = DDIMScheduler(**BETAS, clip_sample=False, timestep_spacing="trailing")
CUMPROD = DDIM.alphas_cumprod
TABLE = flow_sigmas(CUMPROD)


def drawn(seed: int = 0, rows: int = 3) -> tuple[Tensor, Tensor]:
    data, noise = torch.randn(2, rows, 4, 5, generator=torch.Generator().manual_seed(seed))
    return data, noise


def answer(kind: str, data: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """Output of a network that knows data and noise."""
    n = flow_std(sigma)[:, None, None]
    s = sigma[:, None, None]
    return {"epsilon": noise, "sample": data, "v_prediction": ((1 - s) * noise - s * data) / n}[
        kind
    ]


def test_flow_times_by_hand():
    """alpha = .8 and s = .6 make 3/7; alpha = .6 and s = .8 make 4/7."""
    torch.testing.assert_close(
        flow_sigmas(torch.tensor([0.64, 0.36])), torch.tensor([3 / 7, 4 / 7])
    )
    torch.testing.assert_close(flow_sigmas(torch.tensor([1.0, 0.0])), torch.tensor([0.0, 1.0]))


def test_a_flow_state_is_the_diffusion_state_of_the_same_data_and_noise():
    data, noise = drawn()
    times = torch.tensor([3, 400, 999])
    sigma = TABLE[times]
    s = sigma[:, None, None]
    got = preserving_state((1 - s) * data + s * noise, sigma)
    torch.testing.assert_close(got, DDIM.add_noise(data, noise, times), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_perfect_network_has_the_velocity_noise_minus_data(kind):
    data, noise = drawn(1)
    sigma = torch.tensor([0.1, 0.5, 0.93])
    s = sigma[:, None, None]
    got = flow_velocity(kind, answer(kind, data, noise, sigma), (1 - s) * data + s * noise, sigma)
    torch.testing.assert_close(got, noise - data, atol=1e-5, rtol=1e-5)


def test_a_v_network_is_defined_at_pure_noise():
    """At alpha = 0 it says -data, and the state is noise."""
    data, noise = drawn(2)
    got = flow_velocity("v_prediction", -data, noise, torch.ones(3))
    torch.testing.assert_close(got, noise - data)


def test_the_model_s_own_times_come_back_exactly():
    assert torch.equal(fractional_time(TABLE, TABLE), torch.arange(1000.0))


def test_times_in_between_are_linear_in_the_ratio_of_noise_to_data():
    """s / alpha of 1 and 3 at times 0 and 1; 1.5 is a quarter of the way, and sigma = 3/5."""
    table = torch.tensor([1 / 2, 3 / 4, 7 / 8])
    sigma = torch.tensor([0.6, 5 / 6, 0.1, 0.99])
    wanted = torch.tensor([0.25, 1.5, 0.0, 2.0])  # 5 is half way from 3 to 7; clamped outside
    torch.testing.assert_close(fractional_time(sigma, table), wanted)


def test_times_increase_between_all_neighbours_and_end_at_pure_noise():
    sigma = torch.linspace(0.0, 1.0, 5001)
    assert (fractional_time(sigma, TABLE).diff() >= 0).all()
    zero_snr = flow_sigmas(torch.tensor([0.9, 0.3, 0.0]))
    assert fractional_time(zero_snr, zero_snr).tolist() == [0, 1, 2]
    assert fractional_time(torch.tensor([0.99]), zero_snr).isfinite().all()


@pytest.mark.parametrize("num_steps", [1, 3, 7, 28, 30, 1000])
def test_times_are_those_of_trailing_spacing(num_steps):
    DDIM.set_timesteps(num_steps)
    assert torch.equal(even_times(num_steps, 1000), DDIM.timesteps)
    assert even_times(num_steps, 1000)[0] == 999


@pytest.mark.parametrize("num_steps", [0, 1001])
def test_numbers_of_steps_that_the_model_does_not_have_are_refused(num_steps):
    with pytest.raises(ValueError, match=f"number of steps is {num_steps}; .* 1 to 1000"):
        even_times(num_steps, 1000)


def scheduler(cls: Any, kind: str) -> Any:
    extra: dict[str, Any] = (
        {"clip_sample": False, "set_alpha_to_one": True} if cls is DDIMScheduler else {}
    )
    settings: dict[str, Any] = {**BETAS, **extra, "prediction_type": kind}
    made = cls(**settings, timestep_spacing="trailing")
    made.set_timesteps(10)
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cls", [DDIMScheduler, EulerDiscreteScheduler])
@pytest.mark.parametrize("k", [0, 4, 9])
def test_steps_of_ddim_and_euler_are_euler_steps_of_the_flow(cls, kind, k):
    """For any answer of the network; the last step goes to data. Euler's states are x / (1 - s)."""
    x, prediction = drawn(4, rows=1)
    made = scheduler(cls, kind)
    sigmas = torch.cat([TABLE[made.timesteps.long()], torch.zeros(1)])
    sigma, following = sigmas[k : k + 1], sigmas[k + 1 : k + 2]
    ours = x + (following - sigma) * flow_velocity(kind, prediction, x, sigma)
    coordinates = flow_std if cls is DDIMScheduler else lambda s: 1 - s
    made.scale_model_input(x, made.timesteps[k])
    theirs = made.step(prediction, made.timesteps[k], x / coordinates(sigma)).prev_sample
    torch.testing.assert_close(ours, theirs * coordinates(following), atol=2e-5, rtol=2e-5)
