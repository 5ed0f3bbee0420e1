"""Compute the numbers of a benchmark and their intervals over prompts."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.functional.resampling import (
    bootstrap,
    geometric_mean,
    group_means,
    mean,
    min_max,
    number_values,
    round_cents,
    spread,
)
from flowalign.studies.benchmark.card import Card, Group, Metric

REPEATS = 2000
"""Number of bootstrap resamples."""
SEED = 0
"""Seed of the resamples, equal for all models, so that differences are paired."""
Statistic = Callable[[Float[Tensor, "b n"]], Float[Tensor, "b"]]


@dataclass(frozen=True)
class Table:
    """Item scores of one model, as columns of equal length."""

    scores: Mapping[str, Float[Tensor, "n"]]
    """Scores by dimension."""
    groups: Mapping[str, Sequence[str]]
    """Name of each item's group by column."""
    cluster: Int[Tensor, "n"]
    """Prompt of each item. Items of one prompt are resampled together."""

    def rows(self, keep: Int[Tensor, "m"]) -> "Table":
        """Return some of the items."""
        chosen: list[int] = keep.tolist()
        some = {column: [names[i] for i in chosen] for column, names in self.groups.items()}
        scores = {dim: values[keep] for dim, values in self.scores.items()}
        return Table(scores, some, self.cluster[keep])


@dataclass(frozen=True)
class Estimate:
    """Number with its 95 % interval, which is NaN for one prompt, or if all resamples agree."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class ResultLine:
    """Row of the result table."""

    metric: str
    """Name of the metric."""
    group: str
    """Group of the items; empty for the number that the authors report."""
    prompts: int
    """Number of distinct prompts."""
    scores: list[Estimate]
    """Number of each model."""
    differences: list[Estimate]
    """Difference of each model but the first to the first, over the same resamples."""


def compute_lines(card: Card, tables: Sequence[Table]) -> list[ResultLine]:
    """Return all numbers of a benchmark for several models on the same items."""
    lines: list[ResultLine] = []
    metrics = {metric.name: metric for metric in card.metrics}
    for metric in card.metrics:
        if metric.overall:
            lines.append(_compute_line(metric.name, "", metrics, tables))
        if metric.group is None or metric.combine:
            continue
        names = tables[0].groups[metric.group]
        part = Metric(name=metric.name, dims=metric.dims, join=metric.join, scale=metric.scale)
        if metric.over == "rounded_groups":
            part = replace(metric, groups={})
        for group in metric.groups or dict.fromkeys(names):
            keep = torch.tensor([i for i, name in enumerate(names) if name == group]).long()
            some = [table.rows(keep) for table in tables]
            lines.append(_compute_line(metric.name, group, {metric.name: part}, some))
    return lines


def _compute_line(
    name: str, group: str, metrics: Mapping[str, Metric], tables: Sequence[Table]
) -> ResultLine:
    first = tables[0]
    statistics = [_statistic(name, metrics, table) for table in tables]
    stratum = find_strata(metrics[name], first)
    estimate = partial(_estimate, first.cluster, stratum)

    def difference(other: Statistic) -> Statistic:
        return lambda weight: other(weight) - statistics[0](weight)

    return ResultLine(
        name,
        group,
        len(first.cluster.unique()),
        [estimate(statistic) for statistic in statistics],
        [estimate(difference(statistic)) for statistic in statistics[1:]],
    )


def _estimate(
    cluster: Int[Tensor, "n"], stratum: Int[Tensor, "n"], statistic: Statistic
) -> Estimate:
    value = float(statistic(torch.ones(1, len(cluster), dtype=torch.float64)))
    generator = torch.Generator().manual_seed(SEED)
    low, high = bootstrap(statistic, cluster, REPEATS, generator, stratum=stratum)
    return Estimate(value, low, high) if low < high else Estimate(value, math.nan, math.nan)


def _statistic(name: str, metrics: Mapping[str, Metric], table: Table) -> Statistic:
    """Return the reported number as a function of resamples."""
    return lambda weight: aggregate(metrics[name], metrics, table, weight)


def aggregate(
    metric: Metric,
    metrics: Mapping[str, Metric],
    table: Table,
    weight: Float[Tensor, "b n"],
) -> Float[Tensor, "b"]:
    """Return the number that a metric reports for each resample."""
    if metric.combine:
        parts = [aggregate(metrics[name], metrics, table, weight) for name in metric.combine]
        shares = torch.tensor(list(metric.combine.values()), dtype=torch.float64)
        return metric.scale * torch.stack(parts, 1) @ shares / shares.sum()
    x = join_dimensions(metric, table)
    # NaN only where the card says that the official script leaves the item out.
    x, weight = x.nan_to_num(), weight * x.isfinite()
    if metric.over == "items":
        return metric.scale * mean(x, weight)
    if metric.over == "spread":
        columns = [table.scores[dim] for dim in metric.dims]
        return metric.scale * torch.stack([spread(column, weight) for column in columns]).sum(0)
    assert metric.group is not None
    groups = table.groups[metric.group]
    names, index = list(dict.fromkeys(groups)), number_values(groups)
    means = group_means(x, index, weight)
    if metric.over == "rounded_groups":
        means = round_cents(means)
    kinds = [metric.groups.get(name) if metric.groups else Group() for name in names]
    keep = [i for i, kind in enumerate(kinds) if kind]
    values = [(kind.weight, kind.low, kind.high) for kind in kinds if kind]
    weights, low, high = torch.tensor(values, dtype=torch.float64).unbind(1)
    return metric.scale * min_max(means[:, keep], low, high) @ weights / weights.sum()


def join_dimensions(metric: Metric, table: Table) -> Float[Tensor, "n"]:
    """Return the score of each item from its dimensions."""
    columns = torch.stack([table.scores[dim].double() for dim in metric.dims], 1)
    if metric.join == "geometric_mean":
        return geometric_mean(columns)
    if metric.join == "sum":
        return columns.sum(1)
    joined = columns.mean(1)
    return round_cents(joined) if metric.join == "rounded_mean" else joined


def find_strata(metric: Metric, table: Table) -> Int[Tensor, "n"]:
    """Return the groups of a metric if every prompt lies in one of them, else one stratum for all.

    Resamples then keep the shares of the groups, as the prompt file fixes them.
    """
    whole = torch.zeros_like(table.cluster)
    if metric.group is None:
        return whole
    index = number_values(table.groups[metric.group])
    pairs = torch.stack([table.cluster, index], 1).unique(dim=0)
    return index if len(pairs) == len(table.cluster.unique()) else whole
