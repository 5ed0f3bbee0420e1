"""Tell which published models a machine can train, from plans that were made before."""

import json
from pathlib import Path

_TABLE = Path(__file__).with_name("trainable.json")
"""Written by `assets/bench/trainable.py`."""


def describe_models(available: int) -> dict[str, str]:
    """Return a row per published model for a GPU of `available` bytes; 0: without a GPU.

    The rows hold for the size, precision and micro-batch of the bundled run file, without rewards.
    """
    rows = {}
    for name, plan in json.loads(_TABLE.read_text(encoding="utf-8")).items():
        needed = f"{plan['bytes'] / 1e9:.0f} GB"
        verdict = f"fits ({needed})" if plan["bytes"] <= available else f"needs {needed}"
        rows[name] = f"{plan['precision']}, micro-batch {plan['micro_batch']}: {verdict}"
    return rows
