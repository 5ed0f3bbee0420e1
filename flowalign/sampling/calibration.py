"""Calibrate exploration before training: find the noise level that each denoising step tolerates.

The result psi is the eta of `DanceSDE` in sampling, one value per step, so std = psi_k sqrt(dt).

Source: DenseGRPO, arXiv:2601.20218v2, Alg. 1.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.functional.noise_calibration import (
    Signs,
    count_signs,
    damped_rule,
    initial_levels,
    paper_rule,
)
from flowalign.utils.errors import explain_errors
from flowalign.utils.files import read_object, write_text
from flowalign.utils.ranges import PositiveFloat, PositiveInt, require_ranges

Rule = Literal["damped", "paper"]
Gains = Callable[[Tensor, int], Tensor]
"""gains(psi, iteration) returns V_{k+1} - V_k of N trajectories drawn with noise level psi_k at
step k.

One row per trajectory, one column per step; NaN if a reward failed or the step is an ODE step. It
must be a pure function of its arguments. Otherwise a resumed calibration gives different results.
"""
_DEFAULTS = {
    "damped": {"threshold": 0.2, "step": 1.0, "ceiling": 1.0},
    "paper": {"threshold": 2.0, "step": 0.01, "ceiling": None},
}


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Settings of the search for the noise level of each denoising step."""

    rule: Rule = "damped"
    """Update rule of psi. paper: Alg. 1 of DenseGRPO. damped: our choice, with relative steps. The
    paper's rule collapses to the floor if counts are noisy, and its absolute steps are too coarse
    for small psi and too slow for large psi."""
    num_samples: PositiveInt = 64
    """Number of trajectories per iteration, each with a different prompt."""
    iterations: PositiveInt = 40
    """Number of iterations. Raising it continues a finished calibration."""
    threshold: PositiveFloat | None = None
    """Threshold on the signs of gains. paper: psi is lowered if the counts of positive and negative
    gains differ by at least this number; null: 2. damped: tolerated surplus of negative over
    positive gains, as a share in (0, 1); null: 0.2, which is 40 % positive and 60 % negative."""
    step: PositiveFloat | None = None
    """Step size. paper: change of psi; null: 0.01. damped: change of log psi in the first iteration
    if all gains have the same sign; null: 1."""
    floor: PositiveFloat = 1e-3
    """Smallest psi."""
    ceiling: PositiveFloat | None = None
    """Upper bound: psi <= ceiling sqrt(sigma / (1 - sigma)). The signs of gains give no bound at
    steps with noise that the reward does not detect. Null: no bound for paper, and 1 for damped,
    slightly above the 0.7 to 0.9 of published runs."""

    def __post_init__(self) -> None:
        """Reject unknown rules and settings outside their ranges."""
        require_ranges(self, "calibration")
        if self.rule == "damped" and self.threshold is not None and self.threshold >= 1:
            raise ValueError(
                f"calibration.threshold is {self.threshold}; "
                "the damped rule takes a share, above 0 and below 1"
            )

    def settings(self) -> dict[str, Any]:
        """Return all settings except the number of iterations, with the defaults of the rule."""
        own = {name: value for name, value in vars(self).items() if name != "iterations"}
        missing = {name: value for name, value in _DEFAULTS[self.rule].items() if own[name] is None}
        return own | missing

    def move_levels(
        self, psi: Float[Tensor, "T"], signs: Signs, iteration: int, sigmas: Float[Tensor, "T+1"]
    ) -> Float[Tensor, "T"]:
        """Return the next levels; the level of a step without known gains does not change."""
        settings, counts = self.settings(), (psi, signs.positive, signs.negative)
        sizes = {"step": settings["step"], "floor": self.floor}
        if self.rule == "paper":
            after = paper_rule(*counts, threshold=settings["threshold"], **sizes)
        else:
            tolerance = settings["threshold"]
            after = damped_rule(*counts, iteration=iteration, tolerance=tolerance, **sizes)
        if settings["ceiling"] is not None:
            most = initial_levels(sigmas.cpu(), settings["ceiling"])
            after = after.minimum(most).clamp(min=self.floor)
        return torch.where(signs.valid > 0, after, psi)


@dataclass(frozen=True)
class Iteration:
    """Record of one iteration: the noise levels, and the counted signs per step."""

    iteration: int
    """Index of the iteration, from 0."""
    psi: list[float]
    """Noise level of each step."""
    positive: list[int]
    """Number of trajectories per step with a positive gain."""
    negative: list[int]
    """Number of trajectories per step with a negative gain."""
    ties: list[int]
    """Number of trajectories per step with gain 0."""
    valid: list[int]
    """Number of trajectories per step with a known gain; 0 for ODE steps."""


@dataclass(frozen=True)
class History:
    """Content of a calibration file."""

    settings: dict[str, Any]
    """Settings of the `Calibration`, including defaults."""
    identity: dict[str, Any]
    """Everything else that the gains depend on: seed, model, rewards, prompts, schedule."""
    sigmas: list[float]
    """Schedule of the trajectories, rounded to six decimals."""
    psi: list[float]
    """Noise levels after the last iteration, to be used as sampling.eta."""
    iterations: list[Iteration] = field(default_factory=list)
    """Iterations so far, in order."""


def calibrate(
    cfg: Calibration,
    gains: Gains,
    sigmas: Float[Tensor, "S"],
    eta: float,
    path: Path,
    identity: Mapping[str, Any],
    writes: bool = True,
) -> History:
    """Run the remaining iterations, writing the file after each one.

    psi starts at eta sqrt(sigma / (1 - sigma)), the levels of `FlowSDE` with this eta. With several
    processes, all read the file, `gains` gathers, and one process writes.

    Raises:
        ValueError: The file holds no calibration, or one with different settings.
    """
    history = History(
        settings=cfg.settings(),
        identity=json.loads(json.dumps({**identity, "eta": eta})),
        sigmas=[round(sigma, 6) for sigma in sigmas.tolist()],
        psi=initial_levels(sigmas.cpu(), eta).clamp(min=cfg.floor).tolist(),
    )
    if path.exists():
        history = _resume(path, history, cfg.iterations)
    for i in range(len(history.iterations), cfg.iterations):
        psi = torch.tensor(history.psi, dtype=torch.float64)
        measured = gains(psi, i)
        assert measured.shape == (cfg.num_samples, len(psi)), measured.shape
        signs = count_signs(measured.cpu())
        counts = {name: count.tolist() for name, count in signs._asdict().items()}
        row = Iteration(iteration=i, psi=history.psi, valid=signs.valid.tolist(), **counts)
        after = cfg.move_levels(psi, signs, i, sigmas).tolist()
        history = replace(history, psi=after, iterations=[*history.iterations, row])
        if writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, _to_json(history))
    return history


def read_calibration(path: Path) -> History:
    """Read the calibration in a file; raise ValueError if it holds none."""
    kinds = OSError, ValueError, TypeError, KeyError, AttributeError
    with explain_errors(f"{path} holds no calibration", *kinds):
        content = read_object(path)
        rows = [Iteration(**row) for row in content.pop("iterations")]
        return History(**content, iterations=rows)


def _resume(path: Path, fresh: History, num_iterations: int) -> History:
    """Return the history in the file; raise ValueError if its settings differ from `fresh`."""
    held = read_calibration(path)
    stored, current = map(_origin, (held, fresh))
    other = [
        f"{name} {stored.get(name)!r} (now {current.get(name)!r})"
        for name in current | stored
        if stored.get(name) != current.get(name)
    ]
    if other:
        remedy = "Choose another file, delete this one, or calibrate with its settings."
        raise ValueError(f"{path} holds a calibration with {', '.join(other)}.\n{remedy}")
    if len(held.iterations) > num_iterations:
        raise ValueError(
            f"calibration.iterations is {num_iterations}, but {path} already holds "
            f"{len(held.iterations)}"
        )
    return held


def _origin(history: History) -> dict[str, Any]:
    """Return everything that determines the levels, by name."""
    settings = {f"calibration.{name}": value for name, value in history.settings.items()}
    return {**settings, **history.identity, "sigmas": history.sigmas}


def _to_json(history: History) -> str:
    """Return JSON with one line per field and iteration, which is easy to read and to diff."""
    content = asdict(history)
    rows = [json.dumps(row) for row in content.pop("iterations")]
    lines = [f'  "{name}": {json.dumps(value)},\n' for name, value in content.items()]
    return "{\n" + "".join(lines) + '  "iterations": [\n    ' + ",\n    ".join(rows) + "\n  ]\n}\n"
