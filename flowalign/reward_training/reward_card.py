"""Write the model card of a trained reward."""

import json
import math
from collections.abc import Mapping
from typing import Any

from flowalign.reports.pages import render


def render_card(config: Mapping[str, Any]) -> str:
    """Return the card: dimensions, data, agreement with annotators, calibration, licence, use."""
    optional = {"noise": None, "needs_references": False}
    filters = {"shown": _format_value, "json": json.dumps}
    return render("reward_card.md.j2", filters, **optional | dict(config)) + "\n"


def _format_value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_format_value(v) for v in value)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
