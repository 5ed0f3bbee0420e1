"""Judge what probes measured: signal to noise with errors, per cost, and what they recommend."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from statistics import mean, pstdev
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowalign.functional.signal import (
    Products,
    best_weights,
    cross_fit,
    leave_one_out,
    moments,
    signal_to_noise,
    standard_error,
)
from flowalign.studies.probe.measure import Probe
from flowalign.studies.probe.settings import Setting

Metric = Literal["gradient", "update"]
"""What signal and noise are of: the gradient, or the gradient divided as AdamW divides it."""
ERRORS = 2.0
"""Standard errors that a difference must exceed to count."""
UNITS = {"network_evaluations": 1000, "reward_calls": 1000, "decodes": 1000, "seconds": 60}
"""Amount of each cost that signal to noise is told for."""


class Estimate(NamedTuple):
    """Holds an estimate with its jackknife."""

    value: Tensor
    error: Tensor
    """Standard error."""
    left: Tensor
    """Values without each block of batches in turn."""

    def times(self, factor: float) -> "Estimate":
        """Return the estimate in another unit."""
        return Estimate(factor * self.value, factor * self.error, factor * self.left)

    def minus(self, other: "Estimate") -> "Estimate":
        """Return a difference; what both have in common by their batches is no error of it."""
        left = self.left - other.left
        return Estimate(self.value - other.value, standard_error(left), left)

    def shown(self) -> dict[str, float]:
        """Return value and error as numbers."""
        return {"value": float(self.value), "error": float(self.error)}


@dataclass(frozen=True)
class ProbeAnalysis:
    """Judges the probe of one setting in one metric."""

    setting: Setting
    """Run and weights."""
    probe: Probe
    """Gradients and costs."""
    metric: Metric
    """What signal and noise are of."""

    @property
    def products(self) -> Products:
        """Return the inner products in the metric."""
        found = self.probe.gradient if self.metric == "gradient" else self.probe.update
        assert found is not None, "moments of projected gradients are checked before the probe"
        return found

    @cached_property
    def weights(self) -> Float[Tensor, "K"]:
        """Return the best weights of the steps, by all batches."""
        return best_weights(moments(self.products))

    @cached_property
    def best(self) -> Estimate:
        """Return the signal to noise of the best weights, judged by other batches."""
        return self.estimate(lambda kept: cross_fit(self.products, kept))

    @cached_property
    def own(self) -> Estimate:
        """Return the signal to noise of the run file's weights."""
        return self.of(self.probe.own)

    @property
    def per_evaluations(self) -> float:
        """Return what makes a figure of a batch one of 1000 network evaluations."""
        return 1000 * self.probe.batches / self.probe.costs.network_evaluations

    def of(self, weights: Float[Tensor, "K"]) -> Estimate:
        """Return the signal to noise of some weights of the steps."""
        products = self.products
        return self.estimate(lambda kept: signal_to_noise(moments(products, kept), weights))

    def estimate(self, statistic: Callable[[Bool[Tensor, "J"]], Tensor]) -> Estimate:
        """Return a statistic of the blocks, with its error."""
        blocks = len(self.products.batches)
        left = leave_one_out(statistic, blocks)
        value = statistic(torch.ones(blocks, dtype=torch.bool))
        return Estimate(value, standard_error(left), left)

    def step_weight(self, weights: Float[Tensor, "K"]) -> list[float]:
        """Return weights of all denoising steps, as `recipe.step_weight` takes them."""
        found = [0.0] * self.probe.num_steps
        for step, weight in zip(self.probe.steps, weights.tolist(), strict=True):
            found[step] = round(weight, 4)
        return found

    def steps(self) -> list[dict[str, Any]]:
        """Return signal, noise and weights of each step, with standard errors."""
        products = self.products
        signal = self.estimate(lambda kept: moments(products, kept).signal.diagonal())
        noise = self.estimate(lambda kept: moments(products, kept).noise.diagonal())
        columns = {
            "signal": signal.value,
            "signal_error": signal.error,
            "noise": noise.value,
            "noise_error": noise.error,
            "weight": self.probe.own,
            "best_weight": self.weights,
        }
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        return [
            {"step": step} | dict(zip(columns, row, strict=True))
            for step, row in zip(self.probe.steps, rows, strict=True)
        ]

    def figures(self) -> dict[str, Any]:
        """Return steps, and signal to noise of a batch by weights and per cost.

        The best weights are those of all batches, and their signal to noise is that of weights
        found on one half of the batches and judged on the other.
        """
        equal = self.of(torch.ones_like(self.probe.own))
        rows = {"equal weights": equal, "run file's weights": self.own, "best weights": self.best}
        cost = costs(self.probe)
        return {
            "steps": self.steps(),
            "step_weight": self.step_weight(self.weights),
            "signal_to_noise": {
                name: found.shown()
                | {"per": {c: float(found.value) * UNITS[c] / n for c, n in cost.items() if n}}
                for name, found in rows.items()
            },
        }


def costs(probe: Probe) -> dict[str, float]:
    """Return what a batch of a setting costs."""
    counts = {name: float(getattr(probe.costs, name)) for name in UNITS if name != "seconds"}
    every = counts | {"seconds": probe.seconds}
    return {name: total / probe.batches for name, total in every.items()}


def summary(setting: Setting, probe: Probe) -> dict[str, Any]:
    """Return all figures of one setting: in both metrics, what the clip did, and costs."""
    limit = setting.loaded.run.optimizer.max_grad_norm
    return {
        "name": setting.name,
        "batches": probe.batches,
        "projected": probe.is_projected,
        "a_batch": costs(probe),
        "gradient": ProbeAnalysis(setting, probe, "gradient").figures(),
        "update": probe.update and ProbeAnalysis(setting, probe, "update").figures(),
        "clip": {
            "share": mean(float(norm > limit) for norm in probe.norms),
            "max_grad_norm": limit,
            "norm": mean(probe.norms),
            "norm_std": pstdev(probe.norms),
        },
    }


def rank(judged: Sequence[ProbeAnalysis]) -> list[dict[str, Any]]:
    """Rank settings by signal to noise per 1000 evaluations, with what lies within the error.

    It is that of the best weights, judged by other batches, so that a choice of weights is not
    rewarded for noise. Settings are compared at the same weights of the network, batch by batch,
    as they share prompts and noise.
    """
    rows = []
    for at in dict.fromkeys(one.setting.weights for one in judged):
        there = [one for one in judged if one.setting.weights == at]
        found = [(one, one.best.times(one.per_evaluations)) for one in there]
        found.sort(key=lambda pair: -float(pair[1].value))
        for one, figure in found:
            behind = found[0][1].minus(figure)
            rows.append(
                {
                    "name": one.setting.name,
                    "at": at.name if at else None,
                    "per_1000_evaluations": figure.shown(),
                    "run_file": one.own.times(one.per_evaluations).shown(),
                    "behind": behind.shown() if figure is not found[0][1] else None,
                    "within_error": float(behind.value) <= ERRORS * float(behind.error),
                }
            )
    return rows


def drift(judged: Sequence[ProbeAnalysis]) -> list[dict[str, Any]]:
    """Return what best weights of steps are worth at other weights of the network.

    For each pair of checkpoints of one method, `kept` is the signal to noise at the later one with
    step weights found at the earlier one, `renewed` with those found there; each on one half of
    the batches and judged on the other.
    """
    rows = []
    for before, after in combinations(judged, 2):
        if before.setting.method != after.setting.method or before.probe.steps != after.probe.steps:
            continue
        chosen = before.products
        kept = after.estimate(lambda k, a=after, c=chosen: cross_fit(a.products, k, c))
        gain = after.best.minus(kept)
        rows.append(
            {
                "from": before.setting.name,
                "to": after.setting.name,
                "before": before.step_weight(before.weights),
                "after": after.step_weight(after.weights),
                "kept": kept.shown(),
                "renewed": after.best.shown(),
                "gain": gain.shown(),
                "within_error": float(gain.value) <= ERRORS * float(gain.error),
            }
        )
    return rows


def recommend(judged: Sequence[ProbeAnalysis]) -> ProbeAnalysis:
    """Return the setting with most signal to noise per evaluation, at the weights named last."""
    at = [one for one in judged if one.setting.weights == judged[-1].setting.weights]
    return max(at, key=lambda one: float(one.best.value) * one.per_evaluations)


def recommend_weights(judged: ProbeAnalysis) -> list[float] | None:
    """Return the best weights of steps, or None if the run file's own show as much."""
    found = judged.step_weight(judged.weights)
    gains = float(judged.best.value) > float(judged.own.value)
    return found if gains and any(found) else None


def comparison(judged: Sequence[ProbeAnalysis]) -> dict[str, Any]:
    """Return the figures of all settings, their ranking, and the recommendation."""
    best = recommend(judged)
    return {
        "metric": best.metric,
        "ranking": rank(judged),
        "drift": drift(judged),
        "recommended": {"name": best.setting.name, "step_weight": recommend_weights(best)},
        "settings": [summary(one.setting, one.probe) for one in judged],
    }
