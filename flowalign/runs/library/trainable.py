"""Tell which published models a machine can train, from plans that were made before."""

import json
from collections.abc import Mapping
from pathlib import Path

_TABLE = Path(__file__).with_name("trainable.json")
"""Written by `assets/bench/trainable.py`."""


def describe_models(available: int) -> dict[str, str]:
    """Return a row per published model for a GPU of `available` bytes; 0: without a GPU.

    The rows hold for the image or clip size of the bundled run file, without rewards. They name the
    largest micro-batch, up to 8, that fits in the precision of the run file and with 4-bit weights.
    """
    table = json.loads(_TABLE.read_text(encoding="utf-8"))
    return {
        name: "; ".join(f"{kind}: {_describe(plan, available)}" for kind, plan in plans.items())
        for name, plans in table.items()
    }


def _describe(plan: Mapping[str, int], available: int) -> str:
    """Return the largest micro-batch that fits, or the bytes that the smallest one needs."""
    if fitting := [batch for batch, needed in plan.items() if needed <= available]:
        return f"micro-batch {fitting[-1]} fits ({plan[fitting[-1]] / 1e9:.0f} GB)"
    return f"needs {plan[min(plan, key=int)] / 1e9:.0f} GB"
