"""Tell when training makes the pictures worse in ways that the rewards need not see."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite, nan
from typing import Annotated, Any

from flowalign.types.ranges import Range, UnitInterval, require_ranges

_SIGNS = {
    "diversity": "samples of one prompt grow alike",
    "sharpness": "below, pictures blur; above, they are noisy or their contrast grows",
}


@dataclass(frozen=True, kw_only=True)
class SampleBounds:
    """Bounds what held-out samples may become, as shares of what they were before training.

    A quantity that was not measured before training, or was 0, gives no warning.
    """

    least_diversity: UnitInterval = 0.5
    """Smallest diversity; 0: any."""
    least_sharpness: UnitInterval = 0.7
    """Smallest sharpness; 0: any. A Gaussian blur of .5 pixels leaves the embedded model .47."""
    most_sharpness: Annotated[float, Range(least=1)] = 1.5
    """Largest sharpness. Guidance 2.5 takes the embedded model to 1.21, noise of .05 to 2.06."""

    def __post_init__(self) -> None:
        """Reject bounds that no run keeps."""
        require_ranges(self, "evaluation.bounds")

    def warnings(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
        """Return a sentence for each quantity out of bounds, by its name, from two evaluations."""
        found = {}
        for name, (least, most) in self._shares.items():
            was, value = (_number(metrics.get(f"eval/{name}")) for metrics in (before, now))
            if not (isfinite(was) and was > 0):
                continue
            if not least <= value / was <= most:
                bounds = f"{least:g} to {most:g}" if most < inf else f"at least {least:g}"
                found[name] = (
                    f"{name} is {value:.3g}, {value / was:.2f} of the {was:.3g} before training "
                    f"and not {bounds} of it: {_SIGNS[name]}"
                )
        return found

    def last_warnings(self, rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
        """Return the last warning of each quantity in the metrics of a run, with its step."""
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
