"""Compute the results of a comparison: learning curves of methods over seeds, and their costs.

A *method* is a run file; a *run* is one seed of it. Higher values are better. This module reads no
file.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from flowalign.functional.degradation import student_quantile
from flowalign.functional.resampling import LEVEL, smallest_difference
from flowalign.reports.records import number

Cost = Literal["reward_calls", "network_evaluations", "seconds", "gpu_hours", "trajectories"]
Axis = Cost | Literal["distance"]
AXES: tuple[Cost, ...] = get_args(Cost)
DISTANCE: Axis = "distance"
"""Axis of the distance to the samples before training, which is not a cost."""


@dataclass(frozen=True)
class Point:
    """Held-out evaluation, and the training cost up to it."""

    step: int
    value: float
    diversity: float
    """Diversity of the samples; NaN if it was not measured."""
    costs: Mapping[str, float]
    """Cost by axis, `decodes` and `distance`. A missing cost is 0, such as the GPU hours of a run
    on CPUs."""


@dataclass(frozen=True)
class Curve:
    """Evaluations of one run, in the order of steps."""

    seed: int
    points: tuple[Point, ...]

    @property
    def last(self) -> Point:
        """Return the evaluation after training."""
        return self.points[-1]


@dataclass(frozen=True)
class Method:
    """Runs of one run file."""

    name: str
    runs: tuple[Curve, ...]


@dataclass(frozen=True)
class SeedStatistics:
    """Values over seeds, their mean and their sample std (n - 1); the std is NaN for one seed."""

    mean: float
    std: float
    values: tuple[float, ...]


@dataclass(frozen=True)
class Difference:
    """Difference of two means over seeds, with its 95 % interval; NaN without two seeds each."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class BenchmarkLine:
    """Number of the benchmark for each method, over its seeds."""

    metric: str
    """Name of the metric, and of the group of items if there is one."""
    base: float
    """Number of the model before training, for the first method."""
    methods: dict[str, SeedStatistics]
    """Number of each method."""
    differences: dict[str, Difference]
    """Difference of each method but the first to the first, over seeds."""


@dataclass(frozen=True)
class Band:
    """Mean curve, with the lowest and the highest seed."""

    cost: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True)
class Reach:
    """Cost at which a mean curve first met a target; NaN if it never did."""

    cost: float
    share: float
    """Cost as a share of the baseline's cost. NaN if one of them is missing, or if the baseline's
    is 0."""


@dataclass(frozen=True)
class MethodRow:
    """Results of one method."""

    method: Method
    final: SeedStatistics
    difference: Difference
    """Difference to the baseline after training."""
    diversity: SeedStatistics
    costs: dict[Axis, float]
    """Costs of a whole run, the mean over seeds."""
    at_budget: dict[Axis, SeedStatistics]
    reach: dict[Axis, Reach]
    bands: dict[Axis, Band]


@dataclass(frozen=True)
class Comparison:
    """Results of all methods; the first one is the baseline."""

    metric: str
    budgets: dict[Axis, float]
    """Largest cost that every run of every method reached, by axis."""
    rows: tuple[MethodRow, ...]
    fewest_seeds: int
    """Smallest number of seeds of a method."""
    smallest_final: float
    """Smallest true difference after training that these seeds would detect. NaN with one seed
    each."""
    smallest: dict[Axis, float]
    """Smallest detectable difference at the largest cost that every run reached, by axis."""
    distance: str = ""
    """Name of the distance to the samples before training; empty if a run did not measure it."""


def compare(metric: str, methods: Sequence[Method], distance: str = "") -> Comparison:
    """Compute all tables and curves of a comparison from its evaluations."""
    budgets: dict[Axis, float] = {axis: common_budget(methods, axis) for axis in AXES}
    bands: list[dict[Axis, Band]] = [
        {axis: band(method, axis) for axis in (*AXES, DISTANCE)} for method in methods
    ]
    target = bands[0]["trajectories"].mean[-1]
    points = [point for method in methods for run in method.runs for point in run.points]
    measured = all(DISTANCE in point.costs for point in points)
    rows = [
        MethodRow(
            method=method,
            final=seed_statistics(last_values(method)),
            difference=find_difference(last_values(method), last_values(methods[0])),
            diversity=seed_statistics([run.last.diversity for run in method.runs]),
            costs={axis: mine[axis].cost[-1] for axis in AXES},
            at_budget={axis: at_budget(method, axis, budgets[axis]) for axis in AXES},
            reach={axis: reach(mine[axis], bands[0][axis], target) for axis in AXES},
            bands=mine,
        )
        for method, mine in zip(methods, bands, strict=True)
    ]
    return Comparison(
        metric=metric,
        budgets=budgets,
        rows=tuple(rows),
        fewest_seeds=min(len(row.method.runs) for row in rows),
        smallest_final=smallest_difference([row.final.values for row in rows]),
        smallest={a: smallest_difference([r.at_budget[a].values for r in rows]) for a in AXES},
        distance=distance if measured else "",
    )


def seed_statistics(values: Sequence[float]) -> SeedStatistics:
    """Return mean and sample standard deviation of the finite values."""
    known = [value for value in values if math.isfinite(value)]
    mean = float(np.mean(known)) if known else math.nan
    std = float(np.std(known, ddof=1)) if len(known) > 1 else math.nan
    return SeedStatistics(mean, std, tuple(values))


def last_values(method: Method) -> list[float]:
    """Return the value of each run after training."""
    return [run.last.value for run in method.runs]


def find_difference(values: Sequence[float], others: Sequence[float]) -> Difference:
    """Return the difference of two means over seeds, with the interval of Welch's t test.

    The degrees of freedom are rounded down, which widens the interval.
    """
    parts = [[value for value in some if math.isfinite(value)] for some in (values, others)]
    if not all(parts):
        return Difference(math.nan, math.nan, math.nan)
    mean = float(np.mean(parts[0]) - np.mean(parts[1]))
    if min(map(len, parts)) < 2:
        return Difference(mean, math.nan, math.nan)
    errors = [float(np.var(some, ddof=1)) / len(some) for some in parts]
    squares = sum(e**2 / (len(some) - 1) for e, some in zip(errors, parts, strict=True))
    if squares == 0:
        return Difference(mean, mean, mean)
    freedom = math.floor(sum(errors) ** 2 / squares + 1e-9)
    half = student_quantile(LEVEL / 2, max(freedom, 1)) * math.sqrt(sum(errors))
    return Difference(mean, mean - half, mean + half)


def value_at(run: Curve, axis: Axis, budget: float) -> float:
    """Return the value at a cost, linear between evaluations; NaN beyond the cost of the run.

    At costs before the first evaluation, such as the seconds that opening the run took, it is the
    value before training.
    """
    costs = [point.costs.get(axis, 0.0) for point in run.points]
    values = [point.value for point in run.points]
    first = values[0] if run.points[0].step == 0 else math.nan
    return float(np.interp(budget, costs, values, left=first, right=math.nan))


def common_budget(methods: Sequence[Method], axis: Axis) -> float:
    """Return the largest cost that every run of every method reached."""
    return min(run.last.costs.get(axis, 0.0) for method in methods for run in method.runs)


def at_budget(method: Method, axis: Axis, budget: float) -> SeedStatistics:
    """Return statistics over seeds of each run's value at a cost."""
    return seed_statistics([value_at(run, axis, budget) for run in method.runs])


def band(method: Method, axis: Axis) -> Band:
    """Return mean value against mean cost at every step that all seeds evaluated.

    The average is over runs at equal steps instead of equal costs. So the curve ends with the mean
    of the final values, even if the seconds of the runs differ.
    """
    steps = sorted(set.intersection(*({p.step for p in run.points} for run in method.runs)))
    columns = [[p for run in method.runs for p in run.points if p.step == step] for step in steps]
    return Band(
        cost=tuple(float(np.mean([p.costs.get(axis, 0.0) for p in column])) for column in columns),
        mean=tuple(float(np.mean([p.value for p in column])) for column in columns),
        low=tuple(min(p.value for p in column) for column in columns),
        high=tuple(max(p.value for p in column) for column in columns),
    )


def reach(mine: Band, baseline: Band, target: float) -> Reach:
    """Return the cost at which a mean curve first meets the target, and its relative cost."""
    cost, own = first_reach(mine, target), first_reach(baseline, target)
    return Reach(cost, cost / own if own > 0 else math.nan)


def first_reach(curve: Band, target: float) -> float:
    """Return the cost at which a mean curve first meets the target, linear between evaluations.

    The cost is NaN if the curve never meets the target.
    """
    previous: tuple[float, float] | None = None
    for cost, value in zip(curve.cost, curve.mean, strict=True):
        if value >= target - 1e-12:  # means of the same numbers may differ in the last bit
            if previous is None or value <= target:
                return cost
            cost_before, value_before = previous
            share = (target - value_before) / (value - value_before)
            return cost_before + share * (cost - cost_before)
        previous = cost, value
    return math.nan


def leads(comparison: Comparison, axis: Axis) -> list[bool]:
    """Return whether each method has the highest mean at the common budget; ties are all True."""
    means = [row.at_budget[axis].mean for row in comparison.rows]
    return [mean >= max(means) - 1e-12 for mean in means]


def methods_of(content: Mapping[str, Any]) -> list[Method]:
    """Restore the methods of a `compare.json`, for new charts or tables."""

    def curve(run: Mapping[str, Any]) -> Curve:
        points = [
            Point(p["step"], number(p["value"]), number(p["diversity"]), p["costs"])
            for p in run["points"]
        ]
        return Curve(run["seed"], tuple(points))

    return [
        Method(row["method"]["name"], tuple(curve(run) for run in row["method"]["runs"]))
        for row in content["rows"]
    ]
