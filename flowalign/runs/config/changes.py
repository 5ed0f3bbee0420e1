"""Compare the settings of an earlier run with the current ones, and check the differences."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ACCEPTED = (
    "num_steps",
    "optimizer",
    "ema",
    "rewards",
    "evaluation",
    "checkpoints",
    "trackers",
    "notify",
    "device",
    "sharding",
    "offload",
    "prompt_cache",
    "decode_micro_batch",
    "threads",
    "output_dir",
)
"""Settings that a resumed run may change. Model, recipe and seed must stay, as they determined the
steps so far."""
ACCEPTED_ANYWHERE = ("micro_batch", "gradient_checkpointing", "offload_text", "on_failed_reward")
"""Component settings that a resumed run may change, as they do not change the expected update."""
_MOST = 3
"""Largest number of differences that a message lists."""
_LONGEST = 60
_NOTHING = object()


@dataclass(frozen=True)
class SettingChange:
    """Setting that differs between two runs."""

    name: str
    """Dotted name, as in overrides."""
    before: Any
    """Earlier value."""
    after: Any
    """Current value."""

    @property
    def accepted(self) -> bool:
        """Return whether a resumed run may change it; True if the earlier value is unknown."""
        parts = self.name.split(".")
        if self.name == "ema":  # averages would begin or end; their settings may change
            return False
        known = self.before is not _NOTHING  # else an earlier version had no such setting
        return parts[0] in ACCEPTED or parts[-1] in ACCEPTED_ANYWHERE or not known

    def __str__(self) -> str:
        return f"{self.name}: {_shorten(self.before)} -> {_shorten(self.after)}"


def find_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[SettingChange]:
    """Return the settings that differ; for a component of another class, only the class."""
    return list(_iterate_changes("", before, after))


def shorten_list(some: Sequence[object], most: int = _MOST) -> list[str]:
    """Return the first items as lines, and the number of remaining items as the last line."""
    shown = [str(one) for one in (some if len(some) <= most else some[: most - 1])]
    more = len(some) - len(shown)
    return [*shown, *([f"and {more} more"] if more else [])]


def check_resumable(
    before: Mapping[str, Any], after: Mapping[str, Any], where: str
) -> list[SettingChange]:
    """Return the differences from the settings of the resumed run.

    Raises:
        ValueError: A setting differs that a resumed run cannot change.
    """
    found = find_changes(before, after)
    refused = [change for change in found if not change.accepted]
    if refused:
        raise ValueError(
            "\n".join(
                [
                    f"{where} cannot resume with other settings (earlier -> now):",
                    *shorten_list(refused),
                    f"A resumed run may change {', '.join(ACCEPTED)} and every micro_batch.",
                ]
            )
        )
    return found


def _iterate_changes(name: str, before: Any, after: Any) -> Iterable[SettingChange]:
    if not (isinstance(before, Mapping) and isinstance(after, Mapping)):
        if before != after:
            yield SettingChange(name, before, after)
        return
    if before.get("class_path") != after.get("class_path"):
        yield SettingChange(name, before, after)
        return
    for key in dict.fromkeys([*before, *after]):
        inside = name if key == "init_args" else f"{name}.{key}".lstrip(".")
        yield from _iterate_changes(inside, before.get(key, _NOTHING), after.get(key, _NOTHING))


def _shorten(value: Any) -> str:
    if value is _NOTHING:
        return "unknown"
    if isinstance(value, Mapping) and "class_path" in value:
        return str(value["class_path"])
    text = "null" if value is None else str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
