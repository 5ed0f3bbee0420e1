"""List the differences between an evaluation and the protocol card of its benchmark."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowalign.studies.benchmark.card import Card


@dataclass(frozen=True)
class Deviation:
    """Setting that differs from the card, or that the card leaves open."""

    setting: str
    """Name of the setting."""
    card: str
    """Value of the card; `not fixed` if the authors leave it open."""
    here: str
    """Value of this evaluation."""


@dataclass(frozen=True)
class Used:
    """Settings of an evaluation."""

    policy: Mapping[str, Any]
    """Settings of the policy."""
    num_steps: int
    """Number of denoising steps."""
    copies: int
    """Number of images per row."""
    seed: int
    """Seed of the initial noises."""
    rows: int
    """Number of evaluated rows."""
    total_rows: int
    """Number of rows of the prompt file."""
    scorer: str
    """Scorer of `--rewards` or `--scores`; empty for that of the card."""


def find_deviations(card: Card, used: Used) -> tuple[list[Deviation], list[Deviation]]:
    """Return the settings that differ from the card, and those that it leaves open."""
    protocol, size = card.protocol, _read_size(used.policy)
    guidance = used.policy.get("embedded_guidance") or used.policy.get("guidance")
    pairs = [
        ("images per row", protocol.images_per_prompt, used.copies),
        ("denoising steps", protocol.num_steps, used.num_steps),
        ("guidance", protocol.guidance, guidance),
        ("height", protocol.height, size.get("height")),
        ("width", protocol.width, size.get("width")),
        ("seed", protocol.seed, used.seed),
        ("rows", used.total_rows, used.rows),
    ]
    differing = [
        Deviation(name, f"{fixed:g}", "not set" if here is None else f"{here:g}")
        for name, fixed, here in pairs
        if fixed is not None and fixed != here
    ]
    opened = [
        Deviation(name, "not fixed", "not set" if here is None else f"{here:g}")
        for name, fixed, here in pairs
        if fixed is None
    ]
    if used.scorer:
        differing.append(Deviation("scorer", card.scorer, used.scorer))
    elif card.differences:
        differing.append(Deviation("scorer", card.scorer, card.differences))
    if card.prompts.sha256 is None and not card.prompts.bundled:
        opened.append(Deviation("checksum of the prompt file", "not known", "not checked"))
    return differing, opened


def _read_size(policy: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings that hold the size of the images or videos."""
    return policy.get("video") or policy
