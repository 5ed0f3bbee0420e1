"""Draw the charts of a run's report: which metrics belong together, and how they look."""

import base64
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowalign.reports.hover import Frame, hover
from flowalign.reports.records import Lines, Series
from flowalign.utils.strict_yaml import read_yaml

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#555555")
_NUM_TICKS = 5
"""Largest number of intervals between ticks where a chart has no wish of its own; more overlap."""


@dataclass(frozen=True)
class Panel:
    """Describes one small chart."""

    title: str
    unit: str
    lines: Lines
    draw: Callable[[Any, Lines], None]


@dataclass(frozen=True)
class Drawing:
    """Holds a chart as the `src` of an <img>, and its values as the attribute `data-hover`."""

    address: str
    hover: str


def panels(series: Lines, weights: Mapping[str, float] | None = None) -> list[Panel]:
    """Return the charts of the page, in reading order; those without data are left out.

    Reward dimensions of weight 0 are watched, not optimised: they tell whether the others are still
    worth what they seem to be. If no weights are known, all dimensions count as optimised.
    """
    weights = dict.fromkeys((n[7:] for n in series), 1.0) if weights is None else weights

    def pick(**names: str) -> Lines:
        return {label: series[name] for label, name in names.items() if name in series}

    rewards = {name[7:]: line for name, line in series.items() if name.startswith("reward/")}
    watched = {dim: line for dim, line in rewards.items() if not weights.get(dim)}
    optimised = {dim: line for dim, line in rewards.items() if dim not in watched}
    optimised |= pick(weighted="reward_mean")
    times = pick(
        sampling="timing/sample", data="timing/data", reward="timing/reward", update="timing/update"
    )
    clips = pick(above="clip_frac_high", below="clip_frac_low")
    ratio = pick(mean="ratio_mean", std="ratio_std")
    ratio |= {n: {k: v - 1 for k, v in line.items()} for n, line in ratio.items() if n == "mean"}
    found = [
        Panel("Training reward", "mean of a step", optimised, _smoothed),
        Panel("Training reward, only watched", "mean of a step", watched, _smoothed),
        Panel("Held out: optimised and watched", "change", _changes(series, weights), _points),
        *_evaluation(series),
        *_preference(series),
        *_steps(series),
        Panel("Ratio of new to old policy", "ratio - 1", ratio, _band),
        Panel("Clipped transitions", "share", clips, _curves),
        Panel("KL to the reference", "KL", pick(kl="kl"), _curves),
        Panel("Gradient norm", "norm before clipping", pick(norm="optim/grad_norm"), _curves),
        Panel("Prompts without signal", "share of groups", pick(share="zero_std_ratio"), _curves),
        Panel("Time of a step", "seconds", times, _stack),
    ]
    return [panel for panel in found if panel.lines]


def weights_in(config: Path) -> dict[str, float] | None:
    """Read the weights of the reward dimensions from a run file."""
    content = read_yaml(config) if config.exists() else None
    found = content.get("reward_weights") if isinstance(content, dict) else None
    return found and {dim: weight for dim, weight in found.items() if weight is not None}


def _changes(series: Lines, weights: Mapping[str, float]) -> Lines:
    """Return held-out changes since the first evaluation: the weighted sum, each watched dimension.

    The result is empty if nothing is watched.
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


def _preference(series: Lines) -> list[Panel]:
    """Return panels of training on pairs: how many are in order, and whose error rises."""

    def pick(quantity: str) -> Lines:
        names = {"training": quantity, "held out": f"eval/pairs/{quantity}"}
        return {label: series[name] for label, name in names.items() if name in series}

    drifts = {
        f"{row}, {label}": line
        for row in ("chosen", "rejected")
        for label, line in pick(f"drift_{row}").items()
    }
    return [
        Panel("Pairs in the right order", "share", pick("implicit_accuracy"), _smoothed),
        Panel("Error against the reference", "change", drifts, _smoothed),
        Panel("Implicit margin", "margin", pick("margin"), _smoothed),
    ]


def _evaluation(series: Lines) -> list[Panel]:
    dims: dict[str, Lines] = {}
    for name, line in series.items():
        if name.startswith("eval/") and not name.startswith("eval/pairs/"):
            split, _, dim = name[5:].rpartition("/")
            dims.setdefault(dim, {})[split or "all"] = line
    return [Panel(f"Held-out {dim}", "score", lines, _points) for dim, lines in dims.items()]


def _steps(series: Lines) -> list[Panel]:
    found = []
    for what, unit in (("weight", "mean 1"), ("signal", "squared mean"), ("noise", "mean square")):
        names = [name for name in series if name.startswith(f"step_{what}/")]
        steps = sorted(int(name.rpartition("/")[2]) for name in names)
        lines = {f"step {k}": series[f"step_{what}/{k}"] for k in steps}
        found.append(Panel(f"{what.capitalize()} of denoising steps", unit, lines, _ordered))
    return found


def style() -> dict[Any, Any]:
    """Return the looks of every chart: light, without a frame."""
    return {
        "font.size": 11,
        "lines.linewidth": 1.4,
        "axes.edgecolor": "#999999",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#e8e8e8",
        "grid.linewidth": 0.7,
        "axes.axisbelow": True,
        "axes.prop_cycle": f"cycler(color={list(COLOURS)})",
        "axes.labelcolor": "#444444",
        "xtick.color": "#444444",
        "ytick.color": "#444444",
        "svg.hashsalt": "flowalign",
    }


def says_little(panel: Panel) -> bool:
    """Return whether every line of a panel has at most two points, or one value all along."""
    finite = [[v for v in line.values() if math.isfinite(v)] for line in panel.lines.values()]
    return all(len(values) <= 2 or min(values) == max(values) for values in finite)


def sentence(panel: Panel) -> str:
    """Tell in words what a panel would draw, if that is little."""
    told: dict[str, list[str]] = {}
    for label, line in panel.lines.items():
        points = [(step, value) for step, value in sorted(line.items()) if math.isfinite(value)]
        if points:
            name = f"{label} " if len(panel.lines) > 1 else ""
            told.setdefault(_when([k for k, _ in points]), []).append(name + _what(points))
    return "; ".join(f"{', '.join(lines)} ({when})" for when, lines in told.items())


def _what(points: Sequence[tuple[int, float]]) -> str:
    """Tell one value that stays, or two."""
    first, last = points[0][1], points[-1][1]
    return f"{first:.3g}" if first == last else f"{first:.3g} \u2192 {last:.3g}"


def _when(steps: Sequence[int]) -> str:
    if len(steps) > 2:
        return f"all {len(steps)} steps"
    return f"step{'s' * (len(steps) > 1)} {' and '.join(map(str, steps))}"


def chart(panel: Panel) -> Drawing:
    """Draw the panel as an SVG; 320 units wide, so that letters have 11 px on a phone."""
    from matplotlib.ticker import MaxNLocator

    def draw(axes: Any) -> None:
        panel.draw(axes, panel.lines)
        axes.set(xlabel="step", ylabel=panel.unit)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.4g}")
        labels = axes.get_legend_handles_labels()[1]
        if len(labels) > 1:
            columns = 2 if max(map(len, labels)) > 11 else 3
            place = {"loc": "outside upper left", "ncols": columns}
            axes.figure.legend(frameon=False, handlelength=1.2, **place)

    address, frame = framed(draw, (320, 210))
    arrays = {label: _arrays(line) for label, line in panel.lines.items()}
    lines = {label: (x.astype(float).tolist(), y.tolist()) for label, (x, y) in arrays.items()}
    return Drawing(address, hover(frame, "step", lines))


def _arrays(line: Series) -> tuple[np.ndarray, np.ndarray]:
    steps = sorted(line)
    return np.array(steps), np.array([line[step] for step in steps], dtype=float)


def _curves(axes: Any, lines: Lines) -> None:
    """Draw quantities whose zero means something; mark few points, or one would not show."""
    for label, line in lines.items():
        axes.plot(*_arrays(line), label=label, marker="o" if len(line) < 3 else None, markersize=4)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))


def _ordered(axes: Any, lines: Lines) -> None:
    """Draw lines that have an order, in colours from dark to light."""
    from matplotlib import colormaps

    shades = colormaps["viridis"](np.linspace(0, 0.9, len(lines)))
    for (label, line), colour in zip(lines.items(), shades, strict=True):
        axes.plot(*_arrays(line), label=label, color=colour, marker="o", markersize=2)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))


def _points(axes: Any, lines: Lines) -> None:
    for label, line in lines.items():
        axes.plot(*_arrays(line), label=label, marker="o", markersize=4)


def num_smoothed(num_steps: int) -> int:
    """Return over how many steps a training reward is averaged when it is drawn."""
    return max(1, num_steps // 10)


def _smoothed(axes: Any, lines: Lines) -> None:
    """Draw every step faintly, and the mean of the latest tenth of the steps, if long enough."""
    for i, (label, line) in enumerate(lines.items()):
        steps, values = _arrays({k: v for k, v in line.items() if math.isfinite(v)})
        colour = "#222222" if label == "weighted" else COLOURS[i % len(COLOURS)]
        n = num_smoothed(len(steps))
        if n > 1:
            axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
            values = np.array([values[max(0, k - n) : k].mean() for k in range(1, len(values) + 1)])
        marker = "o" if len(steps) < 3 else None
        axes.plot(steps, values, label=label, color=colour, marker=marker, markersize=4)


def _band(axes: Any, lines: Lines) -> None:
    """Draw mean and standard deviation of the ratio, as departures from 1."""
    steps, std = _arrays(lines.get("std", {}))
    mean = np.array([lines.get("mean", {}).get(step, 0.0) for step in steps])
    if len(steps):
        axes.fill_between(steps, mean - std, mean + std, alpha=0.25, linewidth=0, label="± std")
    if "mean" in lines:
        axes.plot(*_arrays(lines["mean"]), label="mean")


def _stack(axes: Any, lines: Lines) -> None:
    steps = sorted(set().union(*lines.values()))
    parts = [np.nan_to_num([line.get(step, 0.0) for step in steps]) for line in lines.values()]
    axes.stackplot(steps, *parts, labels=list(lines), colors=COLOURS, alpha=0.75, linewidth=0)


def drawn(draw: Callable[[Any], None], size: tuple[int, int]) -> str:
    """Return what `draw` puts on its axes, as an SVG data URL of this size."""
    return framed(draw, size)[0]


def framed(draw: Callable[[Any], None], size: tuple[int, int]) -> tuple[str, Frame]:
    """Return what `draw` puts on its axes, as an SVG data URL, and where the axes lie in it."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import AutoLocator, MaxNLocator

    with matplotlib.rc_context(style()):
        figure = Figure(figsize=(size[0] / 72, size[1] / 72), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        if isinstance(axes.xaxis.get_major_locator(), AutoLocator):
            axes.xaxis.set_major_locator(MaxNLocator(_NUM_TICKS, steps=[1, 2, 5, 10]))
        content = io.BytesIO()
        figure.savefig(content, format="svg", metadata={"Date": None})
    box = axes.get_position()
    return data_address("svg+xml", content.getvalue()), Frame(box.x0, box.x1, *axes.get_xlim())


def data_address(kind: str, content: bytes) -> str:
    """Return an image as the `src` of an <img>, so that the page needs no other file."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
