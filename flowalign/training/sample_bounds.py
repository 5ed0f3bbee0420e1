"""Warn if samples degrade in ways that rewards may not detect."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite, nan
from typing import Annotated, Any

from flowalign.types.ranges import Range, UnitInterval, require_ranges

_SIGNS = {
    "diversity": "samples of one prompt become similar",
    "sharpness": "lower values mean blur; higher values mean noise or more contrast",
}


@dataclass(frozen=True, kw_only=True)
class SampleBounds:
    """Bounds of the diversity and sharpness of held-out samples, relative to the initial model.

    A quantity that was 0 or not measured before training gives no warning.
    """

    least_diversity: UnitInterval = 0.5
    """Smallest diversity, relative to the initial model. 0: no bound."""
    least_sharpness: UnitInterval = 0.7
    """Smallest sharpness, relative to the initial model. 0: no bound. For comparison, a Gaussian
    blur of 0.5 pixels reduces the sharpness of Shapes, the bundled toy model, to 0.47."""
    most_sharpness: Annotated[float, Range(least=1)] = 1.5
    """Largest sharpness, relative to the initial model. For comparison, guidance 2.5 raises the
    sharpness of Shapes to 1.21, and noise of 0.05 raises it to 2.06."""

    def __post_init__(self) -> None:
        """Reject bounds outside their ranges."""
        require_ranges(self, "evaluation.bounds")

    def warnings(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
        """Return a warning for each quantity out of bounds, by name, from two evaluations."""
        found = {}
        for name, (least, most) in self._shares.items():
            was, value = (_number(metrics.get(f"eval/{name}")) for metrics in (before, now))
            if not (isfinite(was) and was > 0):
                continue
            if not least <= value / was <= most:
                bounds = f"{least:g} to {most:g}" if most < inf else f"at least {least:g}"
                found[name] = (
                    f"{name} is {value:.3g}, {value / was:.2f} of the {was:.3g} before training; "
                    f"expected {bounds} of it: {_SIGNS[name]}"
                )
        return found

    def last_warnings(self, rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
        """Return the last warning of each quantity in a run, with its step."""
        found: dict[str, str] = {}
        evaluated = {row["evaluated_after"]: row for row in rows if "evaluated_after" in row}
        for done, row in sorted(evaluated.items()):
            found_now = self.warnings(evaluated.get(0, {}), row)
            found |= {name: f"after {done:g} steps {text}" for name, text in found_now.items()}
        return found

    @property
    def _shares(self) -> dict[str, tuple[float, float]]:
        sharpness = self.least_sharpness, self.most_sharpness
        return {"diversity": (self.least_diversity, inf), "sharpness": sharpness}


def _number(value: float | None) -> float:
    return nan if value is None else value
