"""Choose the charts of a run: the groups of metrics, and their titles."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowalign.reports.pages import INK, PALETTE, Chart, Line
from flowalign.reports.records import Lines, Series
from flowalign.utils.strict_yaml import read_yaml


def draw_lines(lines: Lines, colours: Sequence[str] = PALETTE) -> list[Line]:
    """Return one line for each series."""
    return [
        Line(label, *to_arrays(line), colour=colours[i % len(colours)])
        for i, (label, line) in enumerate(lines.items())
    ]


def draw_smoothed(lines: Lines) -> list[Line]:
    """Return a faint line of every step, and the moving average over a tenth of the steps."""
    drawn: list[Line] = []
    for i, (label, line) in enumerate(lines.items()):
        steps, values = to_arrays({k: v for k, v in line.items() if math.isfinite(v)})
        colour = INK if label == "weighted" else PALETTE[i % len(PALETTE)]
        n = num_smoothed(len(steps))
        if n > 1:
            drawn.append(Line(label, steps, values, colour, width=1.0, faint=True))
            values = np.array([values[max(0, k - n) : k].mean() for k in range(1, len(values) + 1)])
        drawn.append(Line(label, steps, values, colour))
    return drawn


def draw_band(lines: Lines) -> list[Line]:
    """Return the mean with a band of one standard deviation."""
    steps, mean = to_arrays(lines.get("mean") or dict.fromkeys(lines["std"], 0.0))
    std = np.array([lines.get("std", {}).get(step, math.nan) for step in steps])
    return [Line("mean ± std", steps, mean, low=mean - std, high=mean + std)]


def draw_ordered(lines: Lines) -> list[Line]:
    """Return lines for ordered series, in colours from violet to yellow."""
    return draw_lines(
        lines, [f"hsl({hue:.0f} 65% 48%)" for hue in np.linspace(280, 50, len(lines))]
    )


@dataclass(frozen=True)
class Panel:
    """Chart of some metrics of a run."""

    title: str
    unit: str
    lines: Lines
    draw: Callable[[Lines], list[Line]] = draw_lines
    from_zero: bool = False


PREFERENCE = {
    ("Preference accuracy", "share"): {
        "training": "implicit_accuracy",
        "held out": "eval/pairs/implicit_accuracy",
    },
    ("Error against the reference", "change"): {
        "chosen, training": "drift_chosen",
        "chosen, held out": "eval/pairs/drift_chosen",
        "rejected, training": "drift_rejected",
        "rejected, held out": "eval/pairs/drift_rejected",
    },
    ("Implicit margin", "margin"): {"training": "margin", "held out": "eval/pairs/margin"},
}
"""Metrics by label, for each title and unit of a chart."""
HEALTH = {
    ("Clipped transitions", "share"): {"above": "clip_frac_high", "below": "clip_frac_low"},
    ("KL to the reference", "KL"): {"kl": "kl"},
    ("Gradient norm", "norm before clipping"): {"norm": "optim/grad_norm"},
    ("Zero-variance groups", "share of groups"): {"share": "zero_std_ratio"},
    ("Time of a step", "seconds"): {
        "total": "timing/step",
        "sampling": "timing/sample",
        "data": "timing/data",
        "reward": "timing/reward",
        "update": "timing/update",
    },
}


def select_panels(series: Lines, weights: Mapping[str, float] | None = None) -> list[Panel]:
    """Return the charts of the page, in reading order; panels without data are left out.

    Reward dimensions of weight 0 are monitored but not optimised. They show whether gains in the
    optimised dimensions come from reward hacking. If the weights are unknown, all dimensions count
    as optimised.
    """
    weights = dict.fromkeys((n[7:] for n in series), 1.0) if weights is None else weights
    rewards = {name[7:]: line for name, line in series.items() if name.startswith("reward/")}
    watched = {dim: line for dim, line in rewards.items() if not weights.get(dim)}
    optimised = {dim: line for dim, line in rewards.items() if dim not in watched}
    optimised |= {"weighted": series["reward_mean"]} if "reward_mean" in series else {}
    panels = [
        Panel("Training reward", "mean of a step", optimised, draw_smoothed),
        Panel("Training reward, monitored only", "mean of a step", watched, draw_smoothed),
        Panel("Held out: optimised and monitored", "change", _held_out_changes(series, weights)),
        *_held_out_panels(series),
        *(Panel(*at, _select(series, names), draw_smoothed) for at, names in PREFERENCE.items()),
        *_step_panels(series),
        _ratio_panel(series),
        *(Panel(*at, _select(series, names), from_zero=True) for at, names in HEALTH.items()),
    ]
    return [panel for panel in panels if panel.lines]


def _select(series: Lines, metrics: Mapping[str, str]) -> Lines:
    """Return the metrics that were measured, by label."""
    return {label: series[name] for label, name in metrics.items() if name in series}


def read_weights(config: Path) -> dict[str, float] | None:
    """Read the weights of the reward dimensions from a run file."""
    content = read_yaml(config) if config.exists() else None
    rewards = content.get("rewards") if isinstance(content, dict) else None
    if not isinstance(rewards, list):
        return None
    weights = [reward.get("weight") for reward in rewards if isinstance(reward, dict)]
    return {dim: value for one in weights if isinstance(one, dict) for dim, value in one.items()}


def describe_run(config: Path) -> str:
    """Return model, method and rewards of a run file; "" without one."""
    content = read_yaml(config) if config.exists() else None
    if not isinstance(content, dict):
        return ""
    policy, recipe = content.get("policy") or {}, content.get("recipe") or {}
    parts = recipe.get("init_args") or {}
    named = [recipe, *(parts.get(name) for name in ("credit", "algorithm", "loss"))]
    method = " + ".join(_class_name(one) for one in named if _class_name(one))
    path = (policy.get("init_args") or {}).get("path")
    model = _class_name(policy) + (f" ({path})" if path else "")
    rewards = ", ".join(dim for dim, weight in (read_weights(config) or {}).items() if weight)
    labelled = ("model", model), ("method", method), ("rewards", rewards)
    return " · ".join(f"{name}: {text}" for name, text in labelled if text)


def _class_name(component: Any) -> str:
    path = component.get("class_path") if isinstance(component, Mapping) else None
    return str(path).rpartition(".")[2] if path else ""


def explain_loading(folder: Path) -> str:
    """Return the line that loads the newest weights of a run directory; "" if it has none."""
    found = sorted((folder / "checkpoints").glob("step-*"))
    if not found:
        return ""
    weights = found[-1] / "ema" if (found[-1] / "ema").is_dir() else found[-1]
    if (weights / "pytorch_lora_weights.safetensors").is_file():
        return f'pipe.load_lora_weights("{weights}")'
    return f"flowalign export {folder}"


def _held_out_changes(series: Lines, weights: Mapping[str, float]) -> Lines:
    """Return held-out changes since the first evaluation: weighted sum and monitored dimensions.

    The result is empty if all dimensions or none are monitored.
    """
    known = {name[5:]: line for name, line in series.items() if name.startswith("eval/")}
    dims = [d for d in known if "/" not in d and f"reward/{d}" in series]
    watched = [d for d in dims if not weights.get(d)]
    if not watched or len(watched) == len(dims):
        return {}
    steps = sorted(set.intersection(*(set(known[d]) for d in dims)))

    def change(parts: Mapping[str, float]) -> Series:
        total = {k: sum(w * known[d][k] for d, w in parts.items()) for k in steps}
        return {k: value - total[steps[0]] for k, value in total.items()}

    optimised = {d: weights[d] for d in dims if d not in watched}
    return {"optimised": change(optimised)} | {d: change({d: 1.0}) for d in watched}


def _held_out_panels(series: Lines) -> list[Panel]:
    dims: dict[str, Lines] = {}
    for name, line in series.items():
        if name.startswith("eval/") and not name.startswith("eval/pairs/"):
            split, _, dim = name[5:].rpartition("/")
            dims.setdefault(dim, {})[split or "all"] = line
    return [Panel(f"Held-out {dim}", "score", lines) for dim, lines in dims.items()]


def _ratio_panel(series: Lines) -> Panel:
    lines = _select(series, {"mean": "ratio_mean", "std": "ratio_std"})
    if "mean" in lines:
        lines["mean"] = {step: value - 1 for step, value in lines["mean"].items()}
    return Panel("Ratio of new to old policy", "ratio - 1", lines, draw_band)


def _step_panels(series: Lines) -> list[Panel]:
    panels = []
    for what, unit in (("weight", "mean 1"), ("signal", "squared mean"), ("noise", "mean square")):
        names = [name for name in series if name.startswith(f"step_{what}/")]
        steps = sorted(int(name.rpartition("/")[2]) for name in names)
        lines = {f"step {k}": series[f"step_{what}/{k}"] for k in steps}
        title = f"{what.capitalize()} of denoising steps"
        panels.append(Panel(title, unit, lines, draw_ordered, from_zero=True))
    return panels


def is_constant(panel: Panel) -> bool:
    """Return whether every line of a panel has at most two points or a constant value."""
    finite = [[v for v in line.values() if math.isfinite(v)] for line in panel.lines.values()]
    return all(len(values) <= 2 or min(values) == max(values) for values in finite)


def describe(panel: Panel) -> str:
    """Return the text that replaces the chart of a panel with few values."""
    texts: dict[str, list[str]] = {}
    for label, line in panel.lines.items():
        points = [(step, value) for step, value in sorted(line.items()) if math.isfinite(value)]
        if points:
            name = f"{label} " if len(panel.lines) > 1 else ""
            ends = dict.fromkeys([points[0][1], points[-1][1]])
            values = " \u2192 ".join(f"{value:.3g}" for value in ends)
            texts.setdefault(_describe_steps(points), []).append(name + values)
    return "; ".join(f"{', '.join(lines)} ({when})" for when, lines in texts.items())


def _describe_steps(points: Sequence[tuple[int, float]]) -> str:
    if len(points) > 2:
        return f"all {len(points)} steps"
    return f"step{'s' * (len(points) > 1)} {' and '.join(str(step) for step, _ in points)}"


def chart(panel: Panel) -> Chart:
    """Return the chart of a panel."""
    lines = panel.draw(panel.lines)
    return Chart(panel.title, "step", panel.unit, lines, from_zero=panel.from_zero)


def to_arrays(line: Series) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps in order, and their values."""
    steps = sorted(line)
    return np.array(steps), np.array([line[step] for step in steps], dtype=float)


def num_smoothed(num_steps: int) -> int:
    """Return the number of steps over which a drawn training reward is averaged."""
    return max(1, num_steps // 10)
