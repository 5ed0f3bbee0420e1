"""Measure the norm of the policy's predictions relative to the reference.

Losses that push away from samples make the norm grow, which leads to over-saturation and artefacts.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from flowalign.functional.forward_process import norm_ratio
from flowalign.types import Batch

_THIRDS = {"low": (0.0, 1 / 3), "middle": (1 / 3, 2 / 3), "high": (2 / 3, torch.inf)}
_RATIO, _ROWS = "norm_ratio/", "norm_rows/"


@torch.no_grad()
def norm_ratios(rows: Batch) -> dict[str, Tensor]:
    """Return sums of ||v|| / ||v_ref|| and row counts, for each third of the noise level range.

    Both are divided by the number of all rows, so that they add up over micro-batches. The result
    is empty if the reference is not evaluated.
    """
    if "reference" not in rows or not rows.num_rows:
        return {}
    target, sigma = rows["target"], rows["sigma"]
    ratio = norm_ratio(rows["policy"] + target, rows["reference"] + target)
    found = {}
    for name, (low, high) in _THIRDS.items():
        inside = ((sigma >= low) & (sigma < high)).to(ratio)
        found[_RATIO + name] = (ratio * inside).mean()
        found[_ROWS + name] = inside.mean()
    return found


def means_by_third(metrics: Mapping[str, float]) -> dict[str, float]:
    """Divide the sums of `norm_ratios` by the row counts, and drop thirds without rows."""
    found = {name: value for name, value in metrics.items() if not name.startswith(_ROWS)}
    for name in _THIRDS:
        total, rows = found.pop(_RATIO + name, 0.0), metrics.get(_ROWS + name, 0.0)
        if rows:
            found[_RATIO + name] = total / rows
    return found
