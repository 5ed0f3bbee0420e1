"""Detect reward hacking: other metrics fall on held-out prompts, but not the optimised reward.

All metrics are paired differences to the evaluation before training, on the same prompts and
noises, with one value per prompt. Evaluation e tests J watched metrics at the level
alpha * 6 / (pi^2 e^2 J), so a run without a true fall raises an alarm with probability at most
alpha. There is no alarm if the optimised reward falls as well (at the level alpha): the training
failed, but nothing was hacked. A rise on held-out prompts is not required, because a reward that
does not generalise is hacked on training prompts alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.functional.degradation import (
    dark_share,
    grid_power,
    lower_bound,
    lower_p,
    spend_level,
    variance_of_laplacian,
)
from flowalign.rewards.composite import Rewards
from flowalign.training.divergence import group_rows
from flowalign.types import MediaBatch, Request
from flowalign.utils.errors import require_default, require_known
from flowalign.utils.files import read_object, write_json
from flowalign.utils.ranges import NonNegativeFloat, PositiveFloat, Range, require_ranges

Action = Literal["warn", "stop", "roll_back"]
"""Reaction to an alarm. warn: a message. stop: the run ends. roll_back: it ends with the weights of
the best evaluation."""
SIGNALS = {"sharpness": variance_of_laplacian, "grid_power": grid_power, "dark_share": dark_share}
"""Measurements of single images, by name."""
DIVERSITY, KL, OPTIMISED, FILE = "diversity", "kl", "optimised", "watch.json"
_SHARPNESS_TOLERANCE = math.log(1.25)
"""Tolerated factor of the sharpness, in both directions."""
_HEALTHY = 0.05
"""Level of the tests, without correction, that the best evaluation must pass."""
Panel = Mapping[str, Float[Tensor, "n"]]
"""Value of each prompt, by metric."""


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Metrics that are measured in evaluations, but not optimised, and the reaction to a fall."""

    metrics: list[str]
    """Reward dimensions without a weight, `diversity`, `sharpness`, `grid_power` (artefacts that
    repeat every 8 pixels), `dark_share` or `kl`, which costs eight evaluations of the network per
    sample."""
    on_hacking: Action = "warn"
    """Reaction when a watched metric falls and the optimised reward does not: warn, stop or
    roll_back."""
    false_alarm_rate: Annotated[float, Range(above=0, below=1)] = 0.05
    """Largest probability that a run without a true fall raises an alarm."""
    tolerance: NonNegativeFloat = 0.1
    """Tolerated fall, in standard deviations of the metric over prompts before training."""
    kl_limit: PositiveFloat | None = None
    """Largest mean squared difference between the velocities of the policy and the initial model,
    which `kl` measures. Every training increases it, so `kl` needs a limit."""

    def __post_init__(self) -> None:
        """Reject settings outside their ranges, and repeated metrics."""
        require_ranges(self, "evaluation.watch")
        if not self.metrics or len(set(self.metrics)) < len(self.metrics):
            raise ValueError(
                f"evaluation.watch.metrics is {self.metrics}; name each metric once, at least one"
            )
        if KL in self.metrics and self.kl_limit is None:
            raise ValueError(
                "evaluation.watch.metrics has kl, but kl_limit is null: set kl_limit, or leave "
                "kl out"
            )
        if KL not in self.metrics:
            require_default(self, "evaluation.watch", "kl is not among the metrics", "kl_limit")

    def check(self, weights: Mapping[str, float], every: int) -> None:
        """Raise ValueError unless the run measures all metrics, and optimises none of them."""
        unweighted = [dim for dim, weight in weights.items() if not weight]
        known = [*unweighted, DIVERSITY, KL, *SIGNALS]
        what = "evaluation.watch.metrics: the run must measure each without a weight, unlike"
        require_known(what, self.metrics, known)
        if not any(weights.values()):
            raise ValueError("evaluation.watch needs a reward with a weight, which may be hacked")
        if every == 0:
            raise ValueError(
                "evaluation.watch compares evaluations during training: set evaluation.every"
            )


@dataclass(frozen=True)
class WatchVerdict:
    """Tests of one evaluation."""

    done: int
    """Number of training steps before the evaluation."""
    rise: float
    """p-value of a rise of the optimised reward."""
    falls: Mapping[str, float]
    """p-value of a fall of each watched metric."""
    alarm: list[str]
    """Metrics that fell significantly while the optimised reward did not; empty without an alarm.
    """
    healthy: bool
    """Whether no watched metric falls at the 5 % level, without correction."""
    gain: float
    """Lower 95 % bound of the rise of the optimised reward."""


def judge(cfg: Watch, base: Panel, now: Panel, evaluation: int, done: int) -> WatchVerdict:
    """Test one evaluation, counted from 1, against the evaluation before training."""
    level = spend_level(cfg.false_alarm_rate, evaluation, len(cfg.metrics))
    change = _usable(now[OPTIMISED] - base[OPTIMISED])
    rise = lower_p(-change)
    falls = {name: _fall(cfg, name, base[name], now[name]) for name in cfg.metrics}
    down = [name for name, p in falls.items() if p <= level]
    alarm = [] if lower_p(change) <= cfg.false_alarm_rate else down
    healthy = all(p > _HEALTHY for p in falls.values())
    return WatchVerdict(done, rise, falls, alarm, healthy, lower_bound(change, _HEALTHY))


def _fall(cfg: Watch, name: str, base: Float[Tensor, "n"], now: Float[Tensor, "n"]) -> float:
    """Return the p-value of a change for the worse beyond the tolerance, or beyond the limit."""
    if name == KL:
        assert cfg.kl_limit is not None
        return lower_p(_usable(cfg.kl_limit - now))
    if name == "sharpness":  # less is blur, more is noise
        change = _usable((now / base).log())
        both = (lower_p(change, _SHARPNESS_TOLERANCE), lower_p(-change, _SHARPNESS_TOLERANCE))
        return min(1.0, 2 * min(both))
    sign = -1 if name in SIGNALS else 1  # artefacts and dark pixels should not increase
    allowed = cfg.tolerance * float(_usable(base).double().std(correction=0))
    return lower_p(_usable(sign * (now - base)), allowed)


def _usable(values: Float[Tensor, "n"]) -> Float[Tensor, "m"]:
    """Return the finite values; prompts with a failed score in either evaluation are left out."""
    return values[values.isfinite()]


def measure_signals(cfg: Watch | None, batch: MediaBatch) -> dict[str, Float[Tensor, "n"]]:
    """Return the sharpness of each sample, and the signals that the run watches."""
    names = ["sharpness", *(name for name in (cfg.metrics if cfg else ()) if name in SIGNALS)]
    return {name: SIGNALS[name](batch.media) for name in names}


def measure_panel(
    cfg: Watch | None,
    requests: Sequence[Request],
    columns: Mapping[str, Float[Tensor, "n"]],
    rewards: Rewards,
    latents: Float[Tensor, "n d"],
) -> dict[str, Float[Tensor, "p"]]:
    """Return the value of each distinct request: the mean over its samples, and their distance.

    `columns` holds a value per sample for each reward dimension, each signal and `kl`. The result
    is empty if nothing is watched.
    """
    if cfg is None:
        return {}
    rows, weights = group_rows(requests), zip(rewards.dims, rewards.weights.tolist(), strict=True)
    weighted = [weight * columns[dim] for dim, weight in weights if weight]
    values = {**columns, OPTIMISED: torch.stack(weighted).sum(0)}
    panel = {
        name: torch.stack([values[name][same].double().mean() for same in rows])
        for name in (OPTIMISED, *cfg.metrics)
        if name != DIVERSITY
    }
    if DIVERSITY in cfg.metrics:
        distances = [torch.pdist(latents[same].float()).mean() for same in rows]
        panel[DIVERSITY] = torch.stack(distances).double()
    return panel


@dataclass
class HackingMonitor:
    """Verdicts of a run, kept in `watch.json` of its directory."""

    cfg: Watch
    folder: Path
    base: dict[str, list[float]] = field(default_factory=dict)
    """Value of each prompt before training, by metric."""
    verdicts: list[WatchVerdict] = field(default_factory=list)
    """Verdicts in the order of evaluations."""

    def resume(self, first_step: int) -> None:
        """Read the verdicts of an earlier process up to a training step."""
        path = self.folder / FILE
        if first_step and path.exists():
            content = read_object(path)
            known = content["base"].items()
            self.base = {n: [math.nan if x is None else x for x in each] for n, each in known}
            found = [WatchVerdict(**row) for row in content["verdicts"]]
            self.verdicts = [one for one in found if one.done <= first_step]

    def update(self, done: int, panel: Panel, write: bool = True) -> WatchVerdict | None:
        """Judge an evaluation; return None for that before training, and for a repeated one."""
        if any(one.done == done for one in self.verdicts) or (done == 0 and self.base):
            return None
        verdict = None
        if done == 0 or not self.base:
            self.base = {name: values.tolist() for name, values in panel.items()}
        else:
            base = {name: torch.tensor(v, dtype=torch.float64) for name, v in self.base.items()}
            verdict = judge(self.cfg, base, panel, len(self.verdicts) + 1, done)
            self.verdicts.append(verdict)
        if write:
            write_json(self.folder / FILE, self.as_json())
        return verdict

    @property
    def best(self) -> WatchVerdict | None:
        """Return the healthy evaluation with the largest certain gain; None without any."""
        healthy = [one for one in self.verdicts if one.healthy and one.gain > 0]
        return max(healthy, key=lambda one: one.gain) if healthy else None

    @property
    def alarmed(self) -> WatchVerdict | None:
        """Return the first verdict with an alarm."""
        return next((one for one in self.verdicts if one.alarm), None)

    @property
    def ends_run(self) -> bool:
        """Return whether an alarm ends the run."""
        return self.cfg.on_hacking != "warn" and self.alarmed is not None

    @property
    def summary(self) -> dict[str, Any]:
        """Return the training steps before the first alarm and before the best evaluation."""
        alarm, best = self.alarmed, self.best
        found = {"alarm_after": alarm and alarm.done, "fell": alarm.alarm if alarm else []}
        return found | {"best_after": best and best.done}

    def as_json(self) -> dict[str, Any]:
        """Return base values, verdicts, alarm and best evaluation as JSON values."""
        verdicts = [asdict(one) for one in self.verdicts]
        return {**self.summary, "base": self.base, "verdicts": verdicts}

    def describe(self, verdict: WatchVerdict) -> str:
        """Return the message of an alarm."""
        falls = ", ".join(f"{name} (p {verdict.falls[name]:.1e})" for name in verdict.alarm)
        best = "no earlier evaluation is better than the start"
        if self.best:
            best = f"the best evaluation is after {self.best.done} steps"
        return (
            f"reward hacking after {verdict.done} steps: these get worse: {falls}, but not the "
            f"optimised reward (rise: p {verdict.rise:.1e});\n{best}"
        )
