"""Transition kernels against arithmetic by hand, torch.distributions, recordings and identities."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, tensor
from torch.testing import assert_close

from flowalign.functional.path_gradient import control_error, pull_through_step
from flowalign.functional.transition import (
    CPS,
    DDIM,
    DanceSDE,
    FlowSDE,
    Gaussian,
    Kernel,
    Precise,
    StepwiseDDIM,
    linear_step,
    log_density,
    mean_sensitivity,
    sample_next,
    transition,
    travelled_velocity,
)
from tests.fixtures.golden import load

SIGMAS = torch.tensor([1.0, 0.8, 0.5, 0.0])
KERNELS = [FlowSDE(), DanceSDE(), CPS(), Precise(), DDIM(), StepwiseDDIM()]
COEFFICIENTS_PRESERVING = [CPS(), Precise(), DDIM(), StepwiseDDIM()]
quick = settings(max_examples=30, deadline=None, database=None)


def kernel_name(value: object) -> str | None:
    return type(value).__name__ if isinstance(value, Kernel) else None


def every(kernels: list) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kernel", kernels, ids=kernel_name)


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def grid(num_steps: int) -> Tensor:
    """Even steps from 1 to 0."""
    return torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)


def sd3_grid(num_steps: int) -> Tensor:
    """The schedule of SD3 in diffusers, which shifts its smallest sigma of .001 twice."""
    t = torch.linspace(1, 3 * 1e-3 / (1 + 2e-3), num_steps, dtype=torch.float64)
    return torch.cat([3 * t / (1 + 2 * t), t.new_zeros(1)])


# By hand ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "eta", "k", "c1", "std"),
    [
        # g^2 = .36 / (1 - .8) = 1.8: std^2 = 1.8 * .2 = .36, c1 = .8 - .36 / 2
        (FlowSDE(), 0.6, 0, 0.62, 0.6),
        # g^2 = .36 * .8 / .2 = 1.44: std^2 = 1.44 * .3 = .432, c1 = .5 - .432 / 1.6
        (FlowSDE(), 0.6, 1, 0.23, 0.657267),
        # g^2 = .36: std^2 = .36 * .5 = .18, c1 = 0 - .18 / 1
        (FlowSDE(), 0.6, 2, -0.18, 0.424264),
        # g = .6: std^2 = .36 * .2 = .072, c1 = .8 - .072 / 2
        (DanceSDE(), 0.6, 0, 0.764, 0.268328),
        # std^2 = .36 * .3 = .108, c1 = .5 - .108 / 1.6
        (DanceSDE(), 0.6, 1, 0.4325, 0.328634),
        # std^2 = .36 * .5 = .18, c1 = 0 - .18 / 1
        (DanceSDE(), 0.6, 2, -0.18, 0.424264),
        # the angle is 30 degrees: c1 = .8 cos 30, std = .8 sin 30
        (CPS(), 1 / 3, 0, 0.692820, 0.4),
        (CPS(), 1 / 3, 1, 0.433013, 0.25),
        (CPS(), 1 / 3, 2, 0.0, 0.0),
        # rho = 0 at sigma = 1
        (Precise(), 1.0, 0, 0.0, 0.8),
        # rho = [.5 * .2 / (.8 * .5)]^(1/2) = .25^(1/2) = .5: std = .5 sqrt(.75)
        (Precise(), 1.0, 1, 0.25, 0.433013),
        # rho = .25^2 = .0625: std = .5 sqrt(1 - .00390625)
        (Precise(), 2.0, 1, 0.03125, 0.499022),
        (Precise(), 1.0, 2, 0.0, 0.0),
        # abar = 0, abar' = .04 / .68: var = .64 (1 - .04 / .68) in VP, times .68 = .4096;
        # c1^2 = (1 - .04 / .68) .68 - .4096 = .2304
        (DDIM(), 0.8, 0, 0.48, 0.64),
        # abar = 1 / 17, abar' = 1 / 2: var = .64 (1/2) (17/16) (15/17) = .3, times norm' .5 = .15;
        # c1^2 = .25 - .15
        (DDIM(), 0.8, 1, 0.316228, 0.387298),
        (DDIM(), 0.8, 2, 0.0, 0.0),
    ],
    ids=kernel_name,
)
def test_coefficients_by_hand(kernel, eta, k, c1, std):
    got = kernel.coefficients(SIGMAS, k, torch.tensor([eta]))
    assert_close(got.c1, torch.tensor([c1]), atol=2e-6, rtol=0)
    assert_close(got.std, torch.tensor([std]), atol=2e-6, rtol=0)


@every(KERNELS)
def test_each_sample_has_its_own_eta(kernel):
    etas = [0.9, 0.0, 0.35]
    together = kernel.coefficients(SIGMAS, 1, torch.tensor(etas))
    for n, eta in enumerate(etas):
        alone = kernel.coefficients(SIGMAS, 1, torch.tensor([eta]))
        assert_close(together.c1[n], alone.c1[0])
        assert_close(together.std[n], alone.std[0])
    assert len(set(together.std.tolist())) == 3


def test_mean_by_hand():
    """x = 2, v = -1, sigma .8 -> .5: x0 = 2.8, x1 = 1.8, mean = .5 * 2.8 + .23 * 1.8.

    Flow-GRPO's own form agrees: g^2 = 1.44, dt = -.3, x (1 + g^2 dt / 2 sigma) = 2 * .73 and
    v (1 + g^2 (1 - sigma) / 2 sigma) dt = -1 * 1.18 * -.3, together 1.814. The second sample has
    x = 1, v = 3, eta = 0 and is the Euler step 1 - .3 * 3.
    """
    x, v = torch.tensor([[2.0], [1.0]]), torch.tensor([[-1.0], [3.0]])
    got = transition(FlowSDE(), x, v, SIGMAS, 1, torch.tensor([0.6, 0.0]))
    assert_close(got.mean, torch.tensor([[1.814], [0.1]]))
    assert_close(got.std, torch.tensor([0.432**0.5, 0.0]))


def test_sample_next_by_hand():
    distribution = Gaussian(torch.tensor([[1.0, 2.0], [3.0, -4.0]]), torch.tensor([0.5, 2.0]))
    got = sample_next(distribution, torch.tensor([[1.0, -1.0], [0.5, 3.0]]))
    assert got.tolist() == [[1.5, 1.5], [4.0, 2.0]]


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        # mean squares .05 and 1: -.05 / .5 + ln 2 - ln(2 pi) / 2 and -1 / 8 - ln 2 - ln(2 pi) / 2
        (CPS("gaussian"), [-0.325791, -1.737086]),
        (CPS(), [-0.05, -1.0]),
    ],
)
def test_log_density_by_hand(kernel, expected):
    distribution = Gaussian(torch.tensor([[1.0, 2.0], [3.0, -4.0]]), torch.tensor([0.5, 2.0]))
    x_next = torch.tensor([[1.1, 1.7], [4.0, -5.0]])
    assert_close(log_density(kernel, x_next, distribution), torch.tensor(expected))


def test_only_cps_drops_the_normalisation():
    assert [k.density == "unit" for k in KERNELS] == [isinstance(k, CPS) for k in KERNELS]
    assert CPS("gaussian").density == "gaussian"


@pytest.mark.parametrize(
    ("kernel", "k", "eta", "kappa"),
    [
        (FlowSDE(), 0, 0.6, -0.2),  # .62 * 0 - 1 * .2
        (FlowSDE(), 1, 0.6, -0.354),  # .23 * .2 - .8 * .5
        (FlowSDE(), 2, 0.6, -0.59),  # -.18 * .5 - .5
        (CPS(), 1, 1 / 3, -0.3133975),  # .433013 * .2 - .4
    ],
    ids=kernel_name,
)
def test_sensitivity_by_hand(kernel, k, eta, kappa):
    got = mean_sensitivity(kernel, SIGMAS, k, torch.tensor([eta]))
    assert_close(got, torch.tensor([kappa]))


# torch.distributions ------------------------------------------------------------------------------


def test_gaussian_log_density_matches_torch_distributions():
    mean, std = randn(3, 4, 2, seed=1), torch.tensor([0.3, 1.7, 0.02], dtype=torch.float64)
    x_next = mean + std[:, None, None] * randn(3, 4, 2, seed=2) * 1.5
    normal = torch.distributions.Normal(mean, std[:, None, None])
    got = log_density(FlowSDE(), x_next, Gaussian(mean, std))
    assert_close(got, normal.log_prob(x_next).mean((1, 2)))


def test_samples_have_the_mean_and_variance_of_the_distribution():
    n = 100_000
    x, v = torch.tensor([[0.7, -2.0]]).expand(n, 2), torch.tensor([[1.3, 0.4]]).expand(n, 2)
    distribution = transition(FlowSDE(), x, v, SIGMAS, 1, torch.full((n,), 0.6))
    drawn = sample_next(distribution, randn(n, 2, seed=3, dtype=torch.float32))
    # x0 = x - .8 v, x1 = x + .2 v, mean = .5 x0 + .23 x1
    expected = 0.73 * torch.tensor([0.7, -2.0]) - 0.354 * torch.tensor([1.3, 0.4])
    assert_close(drawn.mean(0), expected, atol=4 * 0.66 / n**0.5, rtol=0)
    assert_close(drawn.var(0), torch.full((2,), 0.432), rtol=4 * (2 / n) ** 0.5, atol=0)


# Recordings ---------------------------------------------------------------------------------------

RECORDED = [
    pytest.param("A_flow_sde", "", FlowSDE(), id="flow_grpo-flow_sde"),
    pytest.param("A_cps", "", CPS(), id="turningpoint-cps"),
    pytest.param("A_dance", "", DanceSDE(), id="dancegrpo-dance"),
    pytest.param("A_precise", "precise.", Precise(), id="precise-precise"),
    pytest.param("A_precise", "flow_grpo.", FlowSDE(), id="precise-flow_sde"),
    pytest.param("A_precise", "dance_grpo.", DanceSDE(), id="precise-dance"),
    pytest.param("A_precise", "cps.", CPS("gaussian"), id="precise-cps"),
    pytest.param("A_ddim", "", DDIM(), id="ddpo-ddim"),
]


def recorded(item: str, prefix: str) -> dict[str, Tensor]:
    """A recording with `eta`, the full `std` of each step, and `velocity` of a network output."""
    g = load(item, prefix)
    if item == "A_ddim":
        return ddim_in_flow_coordinates(g)
    g["eta"] = g.get("noise_level", g.get("eta")).expand(g["x"].shape[1])
    dt = g["sigmas"][:-1] - g["sigmas"][1:]
    if item == "A_flow_sde":
        g["std"] = g["std_dev_t"] * dt[:, None].sqrt()  # the reference leaves sqrt(dt) out
    elif item == "A_cps":
        g["std"] = g["std_dev_t"]
    elif item == "A_dance":
        g["std"] = (0.3 * dt.sqrt())[:, None]
    elif item == "A_precise":
        g["std"] = g["std"][:, None]
    g["velocity"] = lambda x, output, k: output
    return g


def ddim_in_flow_coordinates(g: dict[str, Tensor]) -> dict:
    """The VP state alpha data + s noise, over alpha + s, is the flow state at s / (alpha + s).

    The density of the divided variable is higher by the log of the divisor. The last step of the
    reference goes to timestep 0, not to clean data, because it clamps the previous timestep.
    """
    abar = g["alphas_cumprod"].double()[[*g["timesteps"].tolist(), 0]]
    alpha, s = abar.sqrt(), (1 - abar).sqrt()
    alpha, s, divisor = (t.reshape(-1, 1, 1, 1, 1) for t in (alpha, s, alpha + s))
    flow = {
        "sigmas": (s / divisor).flatten(),
        "eta": torch.ones(3, dtype=torch.float64),
        "std": g["std"] / divisor[1:].flatten()[:, None],
        "x": g["x"] / divisor[:-1],
        "eps": g["eps"].double(),
        "v": g["v"].double(),
        "v_new": g["v_new"].double(),
        "grad_logp_new": g["grad_logp_new"].double(),
        "velocity": lambda x, noise, k: noise - (x * divisor[k] - s[k] * noise) / alpha[k],
    }
    flow |= {name: g[name] / divisor[1:] for name in ("next", "mean", "mean_new")}
    log_divisor = divisor[1:].flatten()[:, None].log()
    return flow | {name: g[name] + log_divisor for name in ("logp", "logp_new")}


def steps_with_noise(item: str, kernel: Kernel, g: dict[str, Tensor]) -> range:
    """Precise clamps std to 1e-6 where we have 0, so these last steps are left out."""
    clamped = item == "A_precise" and isinstance(kernel, (CPS, Precise))
    return range(len(g["x"]) - clamped)


@pytest.mark.parametrize(("item", "prefix", "kernel"), RECORDED)
def test_mean_std_and_next_state_match_the_recording(item, prefix, kernel):
    g = recorded(item, prefix)
    for k in range(len(g["x"])):
        v = g["velocity"](g["x"][k], g["v"][k], k)
        got = transition(kernel, g["x"][k], v, g["sigmas"], k, g["eta"])
        as_recorded = {"rtol": 1e-5, "atol": 1e-5, "check_dtype": False}
        assert_close(got.mean, g["mean"][k], **as_recorded)
        std = g["std"][k].expand_as(got.std)
        assert_close(got.std, std, rtol=1e-5, atol=1.1e-6, check_dtype=False)
        assert_close(sample_next(got, g["eps"][k]), g["next"][k], **as_recorded)


@pytest.mark.parametrize(("item", "prefix", "kernel"), RECORDED)
def test_log_density_and_its_gradient_match_the_recording(item, prefix, kernel):
    g = recorded(item, prefix)
    # ddpo rounds in its own coordinates, which shows in the gradient where its std is .04
    grad_atol = 5e-6 if item == "A_ddim" else 1e-6
    for k in steps_with_noise(item, kernel, g):
        output, output_new = g["v"][k], g["v_new"][k].clone().requires_grad_()
        v, v_new = (g["velocity"](g["x"][k], out, k) for out in (output, output_new))
        old = transition(kernel, g["x"][k], v, g["sigmas"], k, g["eta"])
        new = transition(kernel, g["x"][k], v_new, g["sigmas"], k, g["eta"])
        logp = log_density(kernel, g["next"][k], old)
        logp_new = log_density(kernel, g["next"][k], new)
        assert_close(new.mean, g["mean_new"][k], rtol=1e-5, atol=1e-5, check_dtype=False)
        assert_close(logp, g["logp"][k], rtol=1e-4, atol=2e-5, check_dtype=False)
        assert_close(logp_new, g["logp_new"][k], rtol=1e-4, atol=2e-5, check_dtype=False)
        (grad,) = torch.autograd.grad(logp_new.sum(), output_new)
        assert_close(grad, g["grad_logp_new"][k], rtol=1e-4, atol=grad_atol)


def test_rows_at_different_steps_match_the_recording():
    g = load("A_flow_sde", "mixed.")
    for row, k in enumerate(g["step"].tolist()):
        x, v, eps, following = (g[key][row, None] for key in ("x", "v", "eps", "next"))
        got = transition(FlowSDE(), x, v, g["sigmas"], k, g["noise_level"][None])
        assert_close(got.mean, g["mean"][row, None], rtol=1e-5, atol=1e-5)
        assert_close(sample_next(got, eps), following, rtol=1e-5, atol=1e-5)
        logp = log_density(FlowSDE(), following, got)
        assert_close(logp, g["logp"][row, None], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("prefix", "kernel"),
    [
        ("precise.", Precise()),
        ("flow_grpo.", FlowSDE()),
        ("dance_grpo.", DanceSDE()),
        ("cps.", CPS()),
    ],
    ids=kernel_name,
)
def test_sensitivity_is_minus_the_guard_scale_of_precise(prefix, kernel):
    g = load("A_precise", prefix)
    eta = g["noise_level"][None]
    got = torch.cat([mean_sensitivity(kernel, g["sigmas"], k, eta) for k in range(10)])
    assert_close(got, -g["jac"], rtol=1e-5, atol=1e-7)


# Identities ---------------------------------------------------------------------------------------


@every(KERNELS)
@pytest.mark.parametrize(
    "sigmas",
    [
        SIGMAS,
        grid(1000).float(),
        sd3_grid(10).float(),
        pytest.param(torch.tensor([1.0, 1.0, 0.6, 0.3, 0.3, 0.0]), id="steps of length 0"),
    ],
)
def test_zero_eta_is_the_euler_step(kernel, sigmas):
    x, v = (randn(2, 3, 4, seed=seed, dtype=torch.float32) for seed in (4, 5))
    for k in {0, 1, len(sigmas) // 2, len(sigmas) - 3, len(sigmas) - 2}:
        got = transition(kernel, x, v, sigmas, k, torch.zeros(2))
        assert_close(got.mean, x + v * (sigmas[k + 1] - sigmas[k]), atol=1e-6, rtol=0)
        assert not got.std.any()


@every(KERNELS)
def test_steps_without_noise_have_log_density_zero_and_a_finite_gradient(kernel):
    kernel = CPS("gaussian") if isinstance(kernel, CPS) else kernel
    x, v = (randn(2, 3, seed=seed, dtype=torch.float32) for seed in (6, 7))
    v.requires_grad_()
    got = transition(kernel, x, v, SIGMAS, 1, torch.tensor([0.0, 0.4]))
    logp = log_density(kernel, randn(2, 3, seed=8, dtype=torch.float32), got)
    (grad,) = torch.autograd.grad(logp.sum(), v)
    assert logp[0] == 0
    assert not grad[0].any()
    assert logp[1] != 0
    assert grad[1].isfinite().all()
    assert grad[1].all()


def test_flow_sde_starts_alike_at_1_and_a_rounding_below_as_unipc_does():
    eta = torch.tensor([0.7])
    at, below = ([first, 0.9828, 0.6, 0.0] for first in (1.0, 0.99999899))
    starts = [FlowSDE().coefficients(torch.tensor(s), 0, eta) for s in (at, below)]
    torch.testing.assert_close(starts[0].std, starts[1].std, rtol=1e-4, atol=0)
    torch.testing.assert_close(starts[0].c1, starts[1].c1, rtol=1e-4, atol=0)
    assert float(starts[1].std) == pytest.approx(0.7, rel=1e-4)


@quick
@given(eta=st.floats(0.05, 1.5), second=st.floats(0.05, 0.99))
def test_first_std_of_flow_sde_is_eta(eta, second):
    sigmas = torch.tensor([1, second, 0], dtype=torch.float64)
    got = FlowSDE().coefficients(sigmas, 0, torch.tensor([eta], dtype=torch.float64))
    assert math.isclose(got.std.item(), eta, rel_tol=1e-9)


@every(COEFFICIENTS_PRESERVING)
@quick
@given(
    eta=st.floats(0.01, 1.0), sigma=st.floats(0.1, 1.0), share=st.just(0.0) | st.floats(1e-6, 0.99)
)
def test_total_noise_level_is_exactly_sigma_next(kernel, eta, sigma, share):
    sigmas = torch.tensor([sigma, sigma * share], dtype=torch.float64)
    c1, std = kernel.coefficients(sigmas, 0, torch.tensor([eta], dtype=torch.float64))
    assert_close(c1**2 + std**2, sigmas[1:] ** 2, rtol=1e-9, atol=1e-12)
    silent = isinstance(kernel, StepwiseDDIM) and sigma == 1  # as its docstring says
    assert (std > 0) == (sigmas[1] > 0 and not silent)


@pytest.mark.parametrize("kernel", [FlowSDE(), DanceSDE()], ids=kernel_name)
def test_total_noise_level_of_the_sdes_exceeds_sigma_next_in_second_order(kernel):
    """c1^2 + std^2 - sigma_next^2 = std^2 dt / sigma + std^4 / (4 sigma^2)."""
    sigmas = SIGMAS.double()
    for k in range(3):
        c1, std = kernel.coefficients(sigmas, k, torch.tensor([0.4, 0.9], dtype=torch.float64))
        dt = sigmas[k] - sigmas[k + 1]
        excess = std**2 * dt / sigmas[k] + std**4 / (4 * sigmas[k] ** 2)
        assert_close(c1**2 + std**2 - sigmas[k + 1] ** 2, excess)


def test_ddim_with_full_noise_is_precise_with_eta_squared_two():
    """Both then have rho = sigma_next (1 - sigma) / (sigma (1 - sigma_next))."""
    sigmas = grid(7)
    one = torch.ones(1, dtype=torch.float64)
    for k in range(7):
        assert_close(
            DDIM().coefficients(sigmas, k, one),
            Precise().coefficients(sigmas, k, one * math.sqrt(2)),
        )


def test_sensitivity_of_flow_sde_has_a_closed_form():
    """-dt at sigma = 1 and -dt (1 + eta^2 / 2) from then on."""
    sigmas, eta = sd3_grid(10), torch.tensor([0.7, 1.1], dtype=torch.float64)
    dt = sigmas[:-1] - sigmas[1:]
    assert_close(mean_sensitivity(FlowSDE(), sigmas, 0, eta), -dt[0].expand(2))
    for k in range(1, 10):
        assert_close(mean_sensitivity(FlowSDE(), sigmas, k, eta), -dt[k] * (1 + eta**2 / 2))


@every(KERNELS)
def test_a_change_of_velocity_moves_the_mean_by_kappa(kernel):
    x, v, dv = (randn(2, 3, 4, seed=seed) for seed in (9, 10, 11))
    eta, sigmas = torch.tensor([0.4, 0.9], dtype=torch.float64), SIGMAS.double()
    for k in range(3):
        kappa = mean_sensitivity(kernel, sigmas, k, eta)
        old, new = (transition(kernel, x, u, sigmas, k, eta).mean for u in (v, v + dv))
        assert_close(new - old, kappa[:, None, None] * dv)
        assert (kappa < 0).all()


def variances(kernel: Kernel, eta: float, sigmas: Tensor, data: float) -> Tensor:
    """Variance after each step on N(0, data); the exact velocity is linear in x."""
    out, one = [torch.ones(1, dtype=torch.float64)], torch.ones(1, 1, dtype=torch.float64)
    for k, s in enumerate(sigmas[:-1]):
        velocity = (s - (1 - s) * data) / (s**2 + (1 - s) ** 2 * data)  # E[noise - data | x] / x
        step = transition(kernel, one, velocity * one, sigmas, k, one[0] * eta)
        out.append(step.mean[0] ** 2 * out[-1] + step.std**2)
    return torch.cat(out)


@pytest.mark.parametrize("kernel", [FlowSDE(), DanceSDE(), Precise(), DDIM()], ids=kernel_name)
def test_fine_steps_keep_the_marginals_of_the_flow(kernel):
    """Within 3% from sigma = .85; before that the diffusion of FlowSDE diverges. CPS is 28% off."""
    sigmas = grid(400)[:381]
    for data in (1.0, 0.3):
        exact = (1 - sigmas) ** 2 * data + sigmas**2
        assert_close(variances(kernel, 0.7, sigmas, data)[60:], exact[60:], rtol=0.03, atol=0)


@pytest.mark.parametrize(
    ("kernel", "eta", "data", "expected"),
    [
        (FlowSDE(), 0.0, 1.0, [0.67, 0.91]),
        (FlowSDE(), 0.7, 1.0, [0.78, 0.95]),
        (DanceSDE(), 0.3, 1.0, [0.68, 0.92]),
        (CPS(), 0.7, 1.0, [0.50, 0.65]),
        (CPS(), 0.8, 1.0, [0.45, 0.58]),
        (Precise(), 0.7, 1.0, [0.62, 0.89]),
        (FlowSDE(), 0.0, 0.04, [0.23, 0.73]),
        (FlowSDE(), 0.7, 0.04, [1.30, 0.85]),
        (DanceSDE(), 0.3, 0.04, [0.71, 0.83]),
        (CPS(), 0.8, 0.04, [0.19, 0.48]),
        (Precise(), 0.7, 0.04, [0.21, 0.68]),
    ],
    ids=kernel_name,
)
def test_few_steps_bias_the_final_variance_as_documented(kernel, eta, data, expected):
    """Final over true variance with 10 and 40 steps of the SD3 schedule."""
    got = [variances(kernel, eta, sd3_grid(n), data)[-1].item() / data for n in (10, 40)]
    assert got == pytest.approx(expected, abs=0.006)


@pytest.mark.parametrize("kernel", [FlowSDE(), CPS()], ids=lambda kernel: type(kernel).__name__)
def test_the_travelled_velocity_is_the_one_whose_mean_was_reached(kernel):
    """x_next is made the mean of a velocity that is known, which differs from sample to sample."""
    sigmas = torch.tensor([1.0, 0.8, 0.3, 0.0], dtype=torch.float64)
    eta = torch.tensor([0.7, 0.0], dtype=torch.float64)
    seed = torch.Generator().manual_seed(1)
    x, travelled = torch.randn(2, 2, 3, 2, dtype=torch.float64, generator=seed)
    x_next = transition(kernel, x, travelled, sigmas, 1, eta).mean
    assert_close(travelled_velocity(kernel, x, x_next, sigmas, 1, eta), travelled)


# Adjoint matching of Gaussians: closed forms for linear and for quadratic rewards -----------------


S, LAM, C = 0.8, 1.5, 0.7
"""Deviation of the data; scale and slope of the reward."""
MEMORYLESS = DDIM()


class Chain:
    """Sampler of data N(0, S^2) with the exact velocity w(sigma) x, in float64."""

    def __init__(self, kernel=MEMORYLESS, eta=1.0, num_steps=40):
        self.sigmas = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
        level = torch.full((1,), eta, dtype=torch.float64)
        steps = [linear_step(kernel, self.sigmas, k, level) for k in range(num_steps)]
        self.keep, self.slope, self.std = (torch.cat(one) for one in zip(*steps, strict=True))
        sigma = self.sigmas[:-1]
        self.variance_at = (1 - self.sigmas) ** 2 * S**2 + self.sigmas**2
        self.velocity = (sigma - (1 - sigma) * S**2) / self.variance_at[:-1]
        self.factor = self.keep + self.slope * self.velocity

    def adjoints(self, last):
        """Adjoints of all states, from that of the last one."""
        found = [last]
        for k in reversed(range(len(self.factor))):
            step = (one[k].expand(len(last)) for one in (self.keep, self.slope))
            found.append(pull_through_step(found[-1], self.velocity[k] * found[-1], *step))
        return found[::-1]

    def moments(self, shifts, factor):
        """Mean and variance of samples, for a shift of each step's mean."""
        mean, variance = 0.0, 1.0
        for shift, m, std in zip(shifts, factor, self.std, strict=True):
            mean, variance = m * mean + shift, m**2 * variance + std**2
        return float(mean), float(variance)


def test_the_error_by_hand():
    """u = -0.5 / 0.5 * 2 = -2, and the optimum is u = -0.5 * 1."""
    error = control_error(tensor([[2.0]]), tensor([[1.0]]), tensor([-0.5]), tensor([0.5]))
    assert_close(error, tensor([2.25]))
    assert control_error(tensor([[0.5]]), tensor([[1.0]]), tensor([-0.5]), tensor([0.5])) == 0


def test_a_linear_reward_has_the_adjoint_and_the_optimum_in_closed_form():
    """For r = c x: a = -lam c s^2 (1 - sigma) / V, and v - v_base = -sigma lam c s^2 / V."""
    chain = Chain(num_steps=800)
    found = torch.cat(chain.adjoints(tensor([[-LAM * C]], dtype=torch.float64)))[:, 0]
    unit = LAM * C * S**2 / chain.variance_at
    assert_close(found, -unit * (1 - chain.sigmas), rtol=0.02, atol=0.005)
    change = -(chain.std**2) * found[1:] / chain.slope
    # the step ends at another level than it starts, and the last one draws no noise
    assert_close(change[:-8], (-chain.sigmas * unit)[:-9], rtol=0.03, atol=0.01)


def shift_and_moments(chain):
    adjoint = torch.cat(chain.adjoints(tensor([[-LAM * C]], dtype=torch.float64)))[:, 0]
    _, plain = chain.moments(torch.zeros_like(chain.std), chain.factor)
    return plain, chain.moments(-(chain.std**2) * adjoint[1:], chain.factor)


@pytest.mark.parametrize(("kernel", "eta"), [(DDIM(), 1.0), (Precise(), 2**0.5)])
def test_samples_of_the_optimum_are_the_tilted_ones_for_any_number_of_steps(kernel, eta):
    """N(0, s^2) exp(lam c x) is N(lam c s^2, s^2): the mean moves, and the variance does not."""
    plain, (mean, variance) = shift_and_moments(Chain(kernel, eta, num_steps=7))
    assert mean == pytest.approx(LAM * C * plain, rel=1e-9)
    assert variance == pytest.approx(plain, rel=1e-9)


def test_a_sampler_with_memory_is_biased():
    plain, (mean, _) = shift_and_moments(Chain(FlowSDE(), 0.5))
    assert mean < 0.9 * LAM * C * plain


def optimal_factors(chain):
    """Factors of the steps under the optimal control; the value of a state is p x^2 / 2."""
    p = [tensor(LAM * C, dtype=torch.float64)]
    for m, std in zip(chain.factor.flip(0), chain.std.flip(0), strict=True):
        p.append(m**2 * p[-1] / (1 + std**2 * p[-1]))
    return chain.factor / (1 + chain.std**2 * torch.stack(p[::-1])[1:])


def test_samples_of_a_quadratic_reward_are_the_tilted_ones_for_many_steps():
    """N(0, s^2) exp(-lam c x^2 / 2) has the variance 1 / (1 / s^2 + lam c)."""
    chain = Chain(num_steps=1000)
    _, variance = chain.moments(torch.zeros_like(chain.std), optimal_factors(chain))
    assert variance == pytest.approx(1 / (1 / S**2 + LAM * C), rel=0.01)


def test_a_quadratic_reward_has_its_optimum_as_the_fixed_point():
    """r = -c x^2 / 2: the adjoint regresses to the optimal control of Riccati's equation."""
    chain, size = Chain(num_steps=8), 100_000
    closed = optimal_factors(chain)
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(9, size, 1, dtype=torch.float64, generator=draw)
    states = [noise[0]]
    for m, std, e in zip(closed, chain.std, noise[1:], strict=True):
        states.append(m * states[-1] + std * e)
    adjoint = chain.adjoints(LAM * C * states[-1])
    for k in range(1, 7):  # regress the target of the control on the state
        x, target = states[k], -chain.std[k] * adjoint[k + 1]
        fitted = (x * target).mean() / x.square().mean()
        optimum = (closed[k] - chain.factor[k]) / chain.std[k]
        assert_close(fitted, optimum, rtol=0.05, atol=0.01)
