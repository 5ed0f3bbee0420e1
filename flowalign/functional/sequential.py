"""Test a growing number of evaluations for changes, with one bound on false alarms of a whole run.

Evaluation e of a run tests J metrics at the level alpha * 6 / (pi^2 e^2 J). The levels of all
evaluations and metrics add up to alpha, so the probability of any false alarm is at most alpha,
however long the run is and however its evaluations depend on each other. The units are prompts.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

_POINTS = 4001
"""Number of points of the quadrature over an angle; odd for Simpson's rule."""


def spend_level(alpha: float, evaluation: int, num_metrics: int) -> float:
    """Return the level of one metric's test at one evaluation, counted from 1."""
    return alpha * 6 / (math.pi**2 * evaluation**2 * num_metrics)


def student_tail(t: Float[Tensor, "*m"], dof: int) -> Float[Tensor, "*m"]:
    """Return P(T > t) for Student's t with `dof` degrees of freedom.

    With t = sqrt(dof) tan(a), the tail is the integral of cos(a)^(dof - 1) over the angles above a,
    relative to that over all angles.
    """
    start = torch.atan(t.double() / dof**0.5)
    grid = torch.linspace(0, 1, _POINTS, dtype=torch.float64)
    weight = torch.full_like(grid, 2.0)
    weight[1::2], weight[0], weight[-1] = 4.0, 1.0, 1.0
    length = math.pi / 2 - start
    angles = start[..., None] + length[..., None] * grid
    area = (angles.cos().clamp(min=0) ** (dof - 1)) @ weight * length / (3 * (_POINTS - 1))
    log_scale = math.lgamma((dof + 1) / 2) - math.lgamma(dof / 2) - 0.5 * math.log(math.pi)
    return (area * math.exp(log_scale)).clamp(0, 1)


def student_quantile(level: float, dof: int) -> float:
    """Return t with P(T > t) = level, by bisection."""
    low, high = -1e4, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        above = float(student_tail(torch.tensor(middle), dof)) > level
        low, high = (middle, high) if above else (low, middle)
    return (low + high) / 2


def lower_p(d: Float[Tensor, "n"], tolerance: float = 0.0) -> float:
    """Return the p-value of the claim that the mean of d is below -tolerance.

    `d` holds one paired difference per prompt. The test is Student's, one-sided. Constant
    differences give 0 or 1. The p-value is 1 for fewer than two prompts.
    """
    n, shift = len(d), d.double() + tolerance
    if n < 2:
        return 1.0
    mean, error = float(shift.mean()), float(shift.std()) / n**0.5
    if error == 0:
        return 0.0 if mean < 0 else 1.0
    return float(student_tail(torch.tensor(-mean / error), n - 1))


def lower_bound(d: Float[Tensor, "n"], level: float) -> float:
    """Return the bound that the mean of d exceeds with confidence 1 - level."""
    n = len(d)
    if n < 2:
        return -math.inf
    return float(d.double().mean() - student_quantile(level, n - 1) * d.double().std() / n**0.5)
