"""Find the GPUs that a run fits, and the settings that make it fit smaller ones.

A GPU of 24 GB is counted as 24 x 10^9 bytes. The remaining 7 % or so is left to the driver and to
gaps between tensors.
"""

import traceback
from collections.abc import Sequence
from dataclasses import replace

from flowalign.runs.planning.run_memory import peak, size
from flowalign.training.recipe_plan import MemoryPart

SIZES = (16, 24, 48, 80)
"""GPU sizes for which a plan reports whether the run fits, in GB."""
LOSSY = (
    "quantization.denoiser",
    "quantization.text_encoders",
    "optimizer.kind: adamw_8bit",
    "recipe.sampling.states.dtype",
    "policy.memory.tile",
    "vae_tile",
    "policy.memory.decode_frames",
)
"""Prefixes of settings that change results; advice names them last."""
_NAMED = 3
"""Largest number of settings that an out-of-memory message names."""
_BY_FUNCTION = {
    "verify_weights": "saved weights",
    "read_encoders": "text encoders",
    "score": "reward models",
    "encode": "text encoders",
    "decode": "decoding",
    "render": "decoding",
    "load_policy": "weights",
    "backward": "activations",
    "step": "optimizer",
    "collect_rollouts": "states",
}
"""Memory part that grows in each function; the most specific function comes first."""


def rows(parts: Sequence[MemoryPart], counts_encoders: bool) -> dict[str, str]:
    """Return the rows of the plan table about GPU sizes, and whether encoders are included."""
    whole = peak(parts)
    fit = [gb for gb in SIZES if whole <= gb * 10**9]
    shown = ", ".join(f"{gb} GB ({size(gb * 10**9 - whole)} to spare)" for gb in fit)
    beside = "" if counts_encoders else "; text encoders and VAE not included"
    table = {"fits a GPU of": (shown or f"none of {SIZES[-1]} GB or less") + beside}
    return table | {f"to fit {gb} GB": advice(parts, gb * 10**9) for gb in SIZES if gb not in fit}


def advice(parts: Sequence[MemoryPart], available: int) -> str:
    """Return the settings that make the run fit, or a note that they do not suffice."""
    settings, left = _choose_settings(parts, available)
    told = ", ".join(settings)
    if left <= available:
        return f"{told} (then about {size(left)})"
    lacking = f"too little by {size(left - available)}"
    return f"{lacking}, even with {told}" if told else lacking


def _choose_settings(parts: Sequence[MemoryPart], available: int) -> tuple[list[str], int]:
    """Return settings in the order of their choice, and the peak with all of them.

    The next setting is the one that suffices and saves least. If none suffices, it is the one that
    saves most. Settings that change results come after all settings that do not.
    """
    chosen: list[str] = []
    while (now := peak(parts)) > available:
        used = {setting.partition(":")[0] for setting in chosen}
        found = {s: peak(_apply_setting(parts, s)) for part in parts for s in part.savings}
        lower = {
            s: then for s, then in found.items() if then < now and s.partition(":")[0] not in used
        }
        if not lower:
            break
        exact = {s: then for s, then in lower.items() if not s.startswith(LOSSY)} or lower
        enough = {s: then for s, then in exact.items() if then <= available}
        best = (
            max(enough, key=lambda s: enough[s]) if enough else min(exact, key=lambda s: exact[s])
        )
        chosen.append(best)
        parts = _apply_setting(parts, best)
    return chosen, peak(parts)


def _apply_setting(parts: Sequence[MemoryPart], setting: str) -> list[MemoryPart]:
    """Return the parts with a setting applied; other savings shrink in proportion."""
    found = []
    for part in parts:
        saved = part.savings.get(setting, 0)
        if saved > 0 and part.num_bytes:
            share = max(0.0, 1 - saved / part.num_bytes)
            others = {s: round(b * share) for s, b in part.savings.items() if s != setting}
            part = replace(part, num_bytes=round(part.num_bytes * share), savings=others)
        found.append(part)
    return found


def explain_shortage(error: BaseException, parts: Sequence[MemoryPart]) -> str:
    """Return the message for a run out of memory: the part, and settings that would help."""
    called = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    name = next((part for function, part in _BY_FUNCTION.items() if function in called), "")
    about = {part.name: part for part in parts}
    planned = f", planned at {size(about[name].num_bytes)}" if name in about else ""
    lines = [f"out of memory on the GPU{f' for {name}{planned}' if name else ''}"]
    lines[0] += f", of {size(peak(parts))} in all without reward models"
    now = peak(parts)
    savings = {s: now - peak(_apply_setting(parts, s)) for part in parts for s in part.savings}
    best = sorted((s for s in savings if savings[s] > 0), key=lambda s: -savings[s])
    best.sort(key=lambda s: s.startswith(LOSSY))
    lines += [f"try: {s}, which saves {size(savings[s])}" for s in best[:_NAMED]]
    if name == "reward models":
        lines[1:] = ["try: serve the rewards from another process (flowalign serve-reward)"]
    return "\n".join([*lines, "flowalign check lists settings for 16, 24, 48 and 80 GB"])
