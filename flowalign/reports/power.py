"""Compute the smallest difference between methods that a number of seeds can detect."""

import math
from collections.abc import Sequence

LEVEL, POWER = 0.05, 0.8
"""Probability of a false positive, and of detecting a difference of the computed size."""


def smallest_difference(methods: Sequence[Sequence[float]]) -> float:
    """Return the smallest true difference of two means that a two-sided t test is likely to detect.

    `methods` are the values of each method's seeds. The test has level 5 % and power 80 %. The
    standard deviation is pooled over all methods. Both compared methods are assumed to have as few
    seeds as the smallest method. NaN if no method has two seeds. The difference is (t_{1-level/2} +
    t_power) s sqrt(2/n), Cohen, "Statistical Power Analysis", 1988. It uses quantiles of the
    central t distribution, so it is slightly too small for few seeds.
    """
    known = [[value for value in values if math.isfinite(value)] for values in methods]
    freedom = sum(len(values) - 1 for values in known if values)
    fewest = min((len(values) for values in known), default=0)
    if not (freedom and fewest):
        return math.nan
    squares = sum((v - sum(values) / len(values)) ** 2 for values in known for v in values)
    error = math.sqrt(squares / freedom) * math.sqrt(2 / fewest)
    return (t_quantile(1 - LEVEL / 2, freedom) + t_quantile(POWER, freedom)) * error


def t_quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's t for a probability above 1/2 and integer freedom.

    It is found by bisection of the closed form in Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    low, high = 0.0, 1.0
    while _central(high, freedom) < 2 * probability - 1:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        above = _central(middle, freedom) > 2 * probability - 1
        low, high = (low, middle) if above else (middle, high)
    return high


def _central(t: float, freedom: int) -> float:
    """Return the probability of [-t, t] under Student's t."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, term, total = math.cos(angle), 1.0, 0.0
    if freedom % 2:
        term = math.cos(angle)
    for i in range(freedom // 2):
        total += term
        k = 2 * i + 1 + freedom % 2
        term *= cosine**2 * k / (k + 1)
    if freedom % 2:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
