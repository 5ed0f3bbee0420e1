"""Noising, times and matching errors against arithmetic by hand."""

from math import sqrt

import pytest
import torch
from torch import Tensor, tensor
from torch.testing import assert_close

from flowalign.functional.noise_matching import (
    add_noise,
    frame_error,
    level_after,
    masked_error,
    point_weights,
    renoise,
    sample_error,
    space_factor,
    step_at,
    velocity_to_data,
)
from flowalign.losses.matching.fits import SFT
from flowalign.training.matching import LogitNormal, SamplerGrid, Teacher, Uniform
from flowalign.training.matching.noising import NoiseLevels, noise_for, num_examples
from flowalign.training.matching.residuals import divergence, matching_residuals
from flowalign.training.matching.states import ForwardNoise, GuidedStep
from flowalign.training.reference import FrozenCopy
from flowalign.types import Batch, VelocityField
from tests.fixtures.golden import load, tiny_velocity
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.preference import pairs, recipe


class Times(PixelPolicy):
    """Its velocity is the state times a number, for latents of any shape."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def velocity(self, x, sigma, cond):
        return self.factor * x


def examples(*shape: int, paired: bool = True, seed: int = 3, **changes) -> Batch:
    """Random latents of any shape."""
    g = torch.Generator().manual_seed(seed)
    n = shape[0]
    defaults = {
        "latents": torch.randn(shape, generator=g),
        "cond": {},
        "weight": torch.ones(n),
        "desirable": torch.arange(n) < n // 2,
    }
    pair = {"pair": torch.arange(n // 2).repeat(2)} if paired else {}
    return Batch(defaults | pair | changes)


# Noise and spaces ---------------------------------------------------------------------------------


def test_a_state_is_the_mixture_of_data_and_noise_of_its_own_row():
    x0, noise = tensor([[1.0, 2.0], [3.0, -1.0]]), tensor([[5.0, -2.0], [7.0, 11.0]])
    assert_close(add_noise(x0, noise, tensor([0.25, 0.9])), tensor([[2.0, 1.0], [6.6, 9.8]]))


def test_states_of_videos_have_one_time_a_row_too():
    x0, noise = torch.ones(2, 3, 4, 5, 6), torch.full((2, 3, 4, 5, 6), 3.0)
    got = add_noise(x0, noise, tensor([0.0, 0.5]))
    assert (got[0] == 1).all()
    assert (got[1] == 2).all()


@pytest.mark.parametrize(
    ("space", "factor"), [("velocity", 1.0), ("noise", 0.4), ("data", 0.6), ("v", sqrt(0.52))]
)
def test_the_factor_of_each_space_is_this_number_at_sigma_06(space, factor):
    assert float(space_factor(space, tensor([0.6]))) == pytest.approx(factor)


def test_a_velocity_error_times_the_factor_is_the_error_of_the_variance_preserving_model():
    """From alpha and s only: the noise, data and v that a guess of the velocity implies."""
    for sigma in (0.05, 0.3, 0.5, 0.77, 0.95):
        norm = sqrt((1 - sigma) ** 2 + sigma**2)
        alpha, s = (1 - sigma) / norm, sigma / norm
        x0, noise, guess = 1.7, -0.6, 0.9
        x_vp = alpha * x0 + s * noise
        # The guess as a diffusion model would state it, from its own state x_vp.
        x = x_vp / (alpha + s)
        x0_hat = x - sigma * guess
        noise_hat = (x_vp - alpha * x0_hat) / s
        error = {
            "velocity": guess - (noise - x0),
            "noise": noise_hat - noise,
            "data": x0_hat - x0,
            "v": (alpha * noise_hat - s * x0_hat) - (alpha * noise - s * x0),
        }
        for space, wanted in error.items():
            found = float(space_factor(space, tensor([sigma]))) * abs(error["velocity"])
            assert found == pytest.approx(abs(wanted), rel=1e-5), (space, sigma)


# Errors -------------------------------------------------------------------------------------------


def test_the_error_of_a_row_is_its_mean_square():
    assert_close(sample_error(tensor([[1.0, -2.0], [3.0, 5.0]])), tensor([2.5, 17.0]))


def test_a_video_has_an_error_for_each_latent_frame_and_a_picture_one():
    residual = torch.zeros(2, 3, 4, 2, 2)
    residual[0, :, 1] = 2.0
    residual[1, 0, 3, 0, 1] = 6.0
    wanted = tensor([[0.0, 4.0, 0.0, 0.0], [0.0, 0.0, 0.0, 3.0]])
    assert_close(frame_error(residual), wanted)
    assert_close(frame_error(residual).mean(1), sample_error(residual))
    picture = tensor([[[[1.0, 2.0]], [[3.0, 4.0]]], [[[5.0, 0.0]], [[0.0, 0.0]]]])
    assert_close(frame_error(picture), tensor([[7.5], [6.25]]))


def test_a_masked_error_is_the_mean_where_the_mask_is_weighted_by_it():
    residual = tensor([[[1.0, 2.0]], [[3.0, 4.0]], [[5.0, 6.0]]])
    mask = tensor([[[0.0, 1.0]], [[1.0, 3.0]], [[0.0, 0.0]]])
    assert_close(masked_error(residual, mask), tensor([4.0, (9 + 48) / 4, 0.0]))


def test_a_mask_of_one_channel_is_that_of_all_channels_and_frames_share_it():
    residual = torch.zeros(1, 2, 3, 1, 2)
    residual[0, 0, 0] = tensor([[1.0, 2.0]])
    residual[0, 1, 2] = tensor([[3.0, 4.0]])
    mask = tensor([1.0, 0.0]).reshape(1, 1, 1, 1, 2)
    assert_close(masked_error(residual, mask), tensor([(1 + 9) / 6]))


def test_an_equal_mask_changes_nothing_whatever_its_size():
    residual = torch.randn(3, 2, 4, 5, generator=torch.Generator().manual_seed(1))
    assert_close(masked_error(residual, torch.full((3, 1, 4, 5), 7.0)), sample_error(residual))


# Draws --------------------------------------------------------------------------------------------


def levels(
    count: int = 6, first: int = 0, key=(0, 0, 0), paired: bool = True, **cfg
) -> NoiseLevels:
    rows = examples(count * (2 if paired else 1), 3, paired=paired)
    return noise_for(recipe(**cfg), PixelPolicy(), rows, first, key)


def drawn(*args, **changes) -> Batch:
    return levels(*args, **changes).all()


def test_the_two_of_a_pair_share_noise_and_time_and_two_pairs_do_not():
    data = drawn()
    noise, sigma = data["noise"], data["sigma"]
    assert torch.equal(noise[:6], noise[6:])
    assert torch.equal(sigma[:6], sigma[6:])
    assert len(sigma[:6].unique()) == 6
    assert len(noise[:6].unique()) == 18


def test_samples_without_partner_have_their_own_noise_and_time():
    noise, sigma = (drawn(5, paired=False)[name] for name in ("noise", "sigma"))
    assert len(sigma.unique()) == 5
    assert len(noise.unique()) == 15


def test_draws_belong_to_the_place_among_all_processes():
    everyone, mine = drawn(6), drawn(3, first=3)
    assert torch.equal(everyone["noise"][3:6], mine["noise"][:3])
    assert torch.equal(everyone["sigma"][3:6], mine["sigma"][:3])


def test_seeds_steps_and_epochs_have_other_draws_and_the_same_key_the_same():
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    found = [drawn(key=key) for key in keys]
    assert len(torch.cat([data["sigma"] for data in found]).unique()) == 4 * 6
    assert len(torch.cat([data["noise"] for data in found]).unique()) == 4 * 18
    assert torch.equal(drawn(key=(0, 1, 0))["noise"], found[2]["noise"])


def test_noise_is_normal_and_times_are_those_of_the_recipe():
    data = levels(400, times=Uniform(low=0.2, high=0.4))
    assert float(data.noise.mean()) == pytest.approx(0, abs=0.1)
    assert float(data.noise.std()) == pytest.approx(1, abs=0.1)
    assert 0.2 <= float(data.sigma.min()) < 0.21
    assert 0.39 < float(data.sigma.max()) <= 0.4
    assert abs(float(torch.corrcoef(torch.stack([data.sigma, data.noise[:, 0]]))[0, 1])) < 0.15


def test_a_part_keeps_pairs_with_their_draws_together():
    data = levels(5)
    part = data.take(tensor([4, 1]))
    assert torch.equal(part["latents"], data.examples["latents"][[4, 1, 9, 6]])
    assert torch.equal(part["noise"], data.noise[[4, 1, 4, 1]])
    parts = [data.take(rows["row"]) for rows in data.rows().split(2)]
    assert [num_examples(some) for some in parts] == [2, 2, 1]
    sigmas = [some["sigma"].chunk(2)[0] for some in parts]
    assert torch.equal(torch.cat(sigmas), data.sigma)


def test_an_example_has_several_levels_and_a_noise_for_each():
    data = levels(3, first=2, times_per_sample=4)
    assert data.index.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert (len(data.sigma.unique()), len(data.noise.unique())) == (12, 36)
    part = data.take(tensor([9, 1]))
    assert torch.equal(part["latents"], data.examples["latents"][[2, 0, 5, 3]])
    assert torch.equal(levels(2, first=3, times_per_sample=4).noise, data.noise[4:])


@pytest.mark.parametrize("stop", [None, 4])
def test_distinct_levels_of_the_sampler_are_each_drawn_once_in_any_order(stop):
    times, count = SamplerGrid(num_steps=5, stop=stop, distinct=True), 5 if stop is None else 4
    data = levels(40, times_per_sample=count, times=times)
    rows = data.sigma.view(40, count)
    expected = torch.linspace(1, 0, 6)[:count]
    assert_close(rows.sort(descending=True).values, expected.expand(40, count))
    assert len({tuple(row) for row in rows.tolist()}) > 20
    assert times.most == count
    assert SamplerGrid(num_steps=5).most is None
    with pytest.raises(ValueError, match=rf"per_sample is 6, but recipe\.times has {count} diff"):
        times.check(PixelPolicy().schedule, 6)


def test_uniform_times_are_shifted_like_a_schedule():
    plain, moved = (
        drawn(50, times=Uniform(low=0.1, high=0.8, shift=s))["sigma"] for s in (1.0, 3.0)
    )
    assert_close(moved, 3 * plain / (1 + 2 * plain))
    assert Uniform(high=0.8, shift=3.0).highest(PixelPolicy().schedule) == pytest.approx(2.4 / 2.6)


def test_a_noise_level_belongs_to_the_step_that_starts_at_it_or_above():
    sigmas = tensor([0.9, 0.5, 0.2, 0.0])
    sigma = tensor([1.0, 0.9, 0.51, 0.5, 0.21, 0.2, 0.19, 1e-6, 0.0])
    assert step_at(sigma, sigmas).tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]


# Residuals ----------------------------------------------------------------------------------------


def given(rows: Batch, sigma, noise) -> Batch:
    """A pair with its time and noise."""
    return rows.with_columns(noise=tensor(noise * 2), sigma=tensor(sigma * 2))


def residuals_of(cfg, policy, part: Batch, **fields) -> Batch:
    """Residuals at the noised latents."""
    return matching_residuals(cfg, policy, ForwardNoise().build(part, policy, None), fields)


X0 = [[1.0, -2.0], [4.0, 0.5]]
"""Winner and loser of one pair."""


@pytest.mark.parametrize(("space", "factor"), [("velocity", 1.0), ("noise", 0.75), ("data", 0.25)])
def test_residuals_are_prediction_minus_target_in_the_space(space, factor):
    rows = examples(2, 2, latents=tensor(X0))
    part = given(rows, [0.25], [[3.0, 1.0]])
    errors = residuals_of(recipe(space=space), Times(2.0), part, reference=Times(-1.0))
    # x = .75 x0 + .25 noise; target = noise - x0.
    x = tensor([[1.5, -1.25], [3.75, 0.625]])
    target = tensor([[2.0, 3.0], [-1.0, 0.5]])
    assert_close(errors["policy"], factor * (2 * x - target))
    assert_close(errors["reference"], factor * (-x - target))


def test_without_a_reference_none_is_evaluated():
    part = given(examples(2, 2), [0.5], [[3.0, 1.0]])
    assert "reference" not in residuals_of(recipe(), Times(2.0), part)


class Told(PixelPolicy):
    """Network that returns a given value plus three times the state."""

    def velocity(self, x, sigma, cond):
        return cond["text"] + 3 * x


def test_a_teacher_who_is_told_something_else_is_matched_instead_of_noise_minus_data():
    said = tensor([[7.0, -3.0], [0.5, 2.5]])
    rows = examples(2, 2, latents=tensor(X0), target_cond={"text": said})
    part, x = given(rows, [0.25], [[3.0, 1.0]]), tensor([[1.5, -1.25], [3.75, 0.625]])
    cfg = recipe(space="noise", teachers={"told": Teacher(path="")})
    errors = residuals_of(cfg, Times(2.0), part, reference=Times(-1.0), told=Told())
    assert_close(errors["policy"], 0.75 * (2 * x - (said + 3 * x)))
    assert_close(errors["reference"], 0.75 * (-x - (said + 3 * x)))


def test_nobody_is_asked_about_no_rows():
    class Unasked(PixelPolicy):
        def velocity(self, x, sigma, cond):
            raise AssertionError

    data = noise_for(recipe(), PixelPolicy(), pairs(0), 4, (0, 0, 0)).all()
    cfg = recipe(teachers={"told": Teacher(path="")})
    errors = residuals_of(cfg, Unasked(), data, reference=Unasked(), told=Unasked())
    assert errors["policy"].shape == errors["reference"].shape == (0, 3)


def test_a_weight_map_multiplies_squared_errors_of_every_channel():
    weights = tensor([[0.25, 1.75], [1.5, 0.5]]).reshape(2, 1, 1, 2)
    plain = examples(2, 3, 1, 2)
    part = given(plain, [0.4], torch.arange(6.0).reshape(1, 3, 1, 2).tolist())
    mapped = part.with_columns(weight_map=weights)
    before, after = (
        residuals_of(recipe(), Times(2.0), some, reference=Times(0.5)) for some in (part, mapped)
    )
    assert_close(after["policy"].square(), weights * before["policy"].square())
    assert_close(after["reference"].square(), weights * before["reference"].square())
    assert_close(after["policy"].sign(), before["policy"].sign())


def test_the_gradient_reaches_the_policy_and_never_the_reference():
    data = noise_for(recipe(), PixelPolicy(), pairs(3), 0, (0, 0, 0)).all()
    policy, other = PixelPolicy(), FrozenCopy(PixelPolicy(seed=1))
    errors = residuals_of(recipe(), policy, data, reference=other)
    assert not errors["reference"].requires_grad
    errors["policy"].square().sum().backward()
    assert all(p.grad is not None for p in policy.denoiser.parameters())


def test_the_divergence_is_the_mean_square_between_both_velocities():
    policy, reference = tensor([[1.0, 4.0], [0.0, 2.0]]), tensor([[0.0, 1.0], [2.0, 2.0]])
    errors = Batch({"policy": policy, "reference": reference})
    assert float(divergence(errors)) == pytest.approx((1 + 9 + 4 + 0) / 4)


# Times --------------------------------------------------------------------------------------------


def times(cfg, count: int = 4001, seed: int = 5) -> torch.Tensor:
    return cfg.draw(count, PixelPolicy(), torch.Generator().manual_seed(seed))


def test_the_odds_of_a_logit_normal_are_the_shift_times_those_of_the_normal():
    z = torch.randn(50, generator=torch.Generator().manual_seed(5))
    sigma = times(LogitNormal(mean=-0.4, std=0.7, shift=3.0), 50)
    assert_close(sigma / (1 - sigma), 3 * (-0.4 + 0.7 * z).exp())


@pytest.mark.parametrize(("shift", "median"), [(1.0, 0.5), (3.0, 0.75), (0.5, 1 / 3)])
def test_the_median_of_a_shifted_logit_normal_is_shift_over_one_plus_shift(shift, median):
    sigma = times(LogitNormal(shift=shift))
    assert float(sigma.median()) == pytest.approx(median, abs=0.02)
    assert 0 < float(sigma.min()) < float(sigma.max()) < 1


def test_a_grid_has_the_levels_of_the_schedule_but_the_clean_end():
    sigma = times(SamplerGrid(num_steps=4))
    assert sigma.unique().tolist() == [0.25, 0.5, 0.75, 1.0]
    shares = [float((sigma == level).float().mean()) for level in (0.25, 0.5, 0.75, 1.0)]
    assert shares == pytest.approx([0.25] * 4, abs=0.03)


def test_a_grid_can_begin_later_and_end_earlier():
    assert times(SamplerGrid(num_steps=5, start=1, stop=3)).unique().tolist() == pytest.approx(
        [0.6, 0.8]
    )
    assert times(SamplerGrid(num_steps=5, start=3)).unique().tolist() == pytest.approx([0.2, 0.4])


def test_uniform_times_fill_their_range():
    sigma = times(Uniform(low=0.3, high=0.9))
    assert 0.3 <= float(sigma.min()) < 0.31
    assert 0.89 < float(sigma.max()) <= 0.9
    assert float(sigma.mean()) == pytest.approx(0.6, abs=0.01)


@pytest.mark.parametrize(
    ("cls", "values", "said"),
    [
        (Uniform, {"low": 0.5, "high": 0.5}, "low 0.5, high 0.5"),
        (Uniform, {"low": -0.1}, "low -0.1"),
        (Uniform, {"high": 1.5}, "high 1.5"),
        (LogitNormal, {"std": 0.0}, "std is 0.0; it must be above 0"),
        (LogitNormal, {"shift": -3.0}, "shift is -3.0; it must be above 0"),
        (LogitNormal, {"std": float("nan")}, "std is nan; it must be above 0"),
        (SamplerGrid, {"num_steps": 4, "start": 4}, "start 4, stop 4"),
        (SamplerGrid, {"num_steps": 4, "stop": 5}, "stop 5"),
        (SamplerGrid, {"num_steps": 0}, "stop 0"),
    ],
)
def test_times_that_are_none_are_refused_by_name(cls, values, said):
    with pytest.raises(ValueError, match=said):
        cls(**values)


# Points off the way of the data: arithmetic by hand, and the numbers of SOAR's own code -----------


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
