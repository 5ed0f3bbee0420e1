"""Analyse probes: signal-to-noise ratio with errors and per cost, and the recommended settings."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
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
from flowalign.reports.probe_page import page
from flowalign.studies.probe.measure import Probe
from flowalign.studies.probe.probe_settings import Setting
from flowalign.utils.files import write_text

Metric = Literal["gradient", "update"]
"""Vector that is analysed: the gradient, or the gradient scaled as AdamW scales it."""
ERRORS = 2.0
"""Number of standard errors above which a difference is significant."""
UNITS = {"network_evaluations": 1000, "reward_calls": 1000, "decodes": 1000, "seconds": 60}
"""Amount of each cost for which the signal-to-noise ratio is reported."""


class Estimate(NamedTuple):
    """Estimate with its jackknife."""

    value: Tensor
    error: Tensor
    """Standard error."""
    left: Tensor
    """Values without each block of batches in turn."""

    def times(self, factor: float) -> "Estimate":
        """Return the estimate in another unit."""
        return Estimate(factor * self.value, factor * self.error, factor * self.left)

    def minus(self, other: "Estimate") -> "Estimate":
        """Return a difference; an error that both share, as they use the same batches, cancels."""
        left = self.left - other.left
        return Estimate(self.value - other.value, standard_error(left), left)

    def shown(self) -> dict[str, float]:
        """Return value and error as numbers."""
        return {"value": float(self.value), "error": float(self.error)}


@dataclass(frozen=True)
class ProbeAnalysis:
    """Analysis of the probe of one setting in one metric."""

    setting: Setting
    """Run and weights."""
    probe: Probe
    """Gradients and costs."""
    metric: Metric
    """Vector that is analysed."""

    @property
    def products(self) -> Products:
        """Return the inner products in the metric."""
        found = self.probe.gradient if self.metric == "gradient" else self.probe.update
        assert found is not None, "moments of projected gradients are checked before the probe"
        return found

    @cached_property
    def weights(self) -> Float[Tensor, "K"]:
        """Return the best step weights, estimated from all batches."""
        return best_weights(moments(self.products))

    @cached_property
    def best(self) -> Estimate:
        """Return the cross-fitted signal-to-noise ratio of the best weights."""
        return self.estimate(lambda kept: cross_fit(self.products, kept))

    @cached_property
    def own(self) -> Estimate:
        """Return the signal-to-noise ratio of the run file's weights."""
        return self.of(self.probe.own)

    @property
    def per_evaluations(self) -> float:
        """Return the factor from a value per batch to a value per 1000 network evaluations."""
        return 1000 * self.probe.batches / self.probe.costs.network_evaluations

    def of(self, weights: Float[Tensor, "K"]) -> Estimate:
        """Return the signal-to-noise ratio of given step weights."""
        products = self.products
        return self.estimate(lambda kept: signal_to_noise(moments(products, kept), weights))

    def estimate(self, statistic: Callable[[Bool[Tensor, "J"]], Tensor]) -> Estimate:
        """Return a statistic of the blocks, with its error."""
        blocks = len(self.products.batches)
        left = leave_one_out(statistic, blocks)
        value = statistic(torch.ones(blocks, dtype=torch.bool))
        return Estimate(value, standard_error(left), left)

    def step_weight(self, weights: Float[Tensor, "K"]) -> list[float]:
        """Return weights of all denoising steps, in the format of `recipe.step_weight`."""
        known = dict(zip(self.probe.steps, weights.tolist(), strict=True))
        return [round(known.get(step, 0.0), 4) for step in range(self.probe.num_steps)]

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
        return [
            {"step": step} | {name: float(column[i]) for name, column in columns.items()}
            for i, step in enumerate(self.probe.steps)
        ]

    def figures(self) -> dict[str, Any]:
        """Return the steps, and the signal-to-noise ratio of a batch for each choice of weights.

        The best weights come from all batches. Their signal-to-noise ratio is cross-fitted: weights
        from one half of the batches are measured on the other half.
        """
        equal = self.of(torch.ones_like(self.probe.own))
        rows = {"equal weights": equal, "run file's weights": self.own, "best weights": self.best}
        cost = self.probe.batch_costs
        return {
            "steps": self.steps(),
            "step_weight": self.step_weight(self.weights),
            "signal_to_noise": {
                name: found.shown()
                | {"per": {c: float(found.value) * UNITS[c] / n for c, n in cost.items() if n}}
                for name, found in rows.items()
            },
        }


def summary(setting: Setting, probe: Probe) -> dict[str, Any]:
    """Return all results of one setting: both metrics, gradient clipping, and costs."""
    limit = setting.loaded.run.optimizer.max_grad_norm
    return {
        "name": setting.name,
        "batches": probe.batches,
        "projected": probe.is_projected,
        "a_batch": probe.batch_costs,
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
    """Rank settings by signal-to-noise ratio per 1000 evaluations, and mark ties within the error.

    The ratio is the cross-fitted one of the best weights, so a choice of weights is not rewarded
    for noise. Settings are compared batch by batch at the same network weights, since they share
    prompts and noise.
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
    """Return the value of the best step weights at other network weights.

    For each pair of checkpoints of one method, `kept` is the signal-to-noise ratio at the later
    checkpoint with step weights from the earlier one. `renewed` uses step weights from the later
    one. Both are cross-fitted on halves of the batches.
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
    """Return the setting with the best ratio per evaluation, at the network weights named last."""
    at = [one for one in judged if one.setting.weights == judged[-1].setting.weights]
    return max(at, key=lambda one: float(one.best.value) * one.per_evaluations)


def recommend_weights(judged: ProbeAnalysis) -> list[float] | None:
    """Return the best step weights, or None if the run file's own are as good."""
    found = judged.step_weight(judged.weights)
    gains = float(judged.best.value) > float(judged.own.value)
    return found if gains and any(found) else None


def comparison(judged: Sequence[ProbeAnalysis]) -> dict[str, Any]:
    """Return the results of all settings, their ranking, and the recommendation."""
    best = recommend(judged)
    return {
        "metric": best.metric,
        "ranking": rank(judged),
        "drift": drift(judged),
        "recommended": {"name": best.setting.name, "step_weight": recommend_weights(best)},
        "settings": [summary(one.setting, one.probe) for one in judged],
    }


def write_page(folder: Path, figures: Mapping[str, Any]) -> None:
    """Write the results of `comparison` so far and their page to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "probe.json", json.dumps(figures, indent=1, allow_nan=False) + "\n")
    write_text(folder / "index.html", page(folder.resolve().name, figures))
