"""Collect the settings of a foreign configuration while they are converted to a run file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_MISSING = object()


@dataclass(frozen=True)
class Facts:
    """Numbers of the source that the run file must keep."""

    effective_batch: int
    """Samples, or pairs, per optimizer update over all GPUs."""
    num_steps: int | None
    """Training steps. None: the source sets none."""
    learning_rate: float
    clip_range: float | None = None
    kl_weight: float | None = None
    denoising_steps: int | None = None


@dataclass
class Draft:
    """Run file in the making, with the differences from its source."""

    layers: list[str]
    """Bundled run files under the settings."""
    facts: Facts
    gpus: int
    """Number of GPUs of the source."""
    settings: dict[str, Any] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)


class Source:
    """Flat settings of a foreign configuration, which notes the settings that were read."""

    def __init__(self, settings: Mapping[str, Any], assigned: Mapping[str, Any] | None = None):
        self._values = dict(flatten(settings))
        self.assigned = set(self._values if assigned is None else dict(flatten(assigned)))
        self._read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Return a setting; None counts as missing."""
        self._read.add(key)
        value = self._values.get(key)
        return default if value is None else value

    def need(self, key: str) -> Any:
        """Return a setting; raise ValueError if it is missing."""
        if self.get(key, _MISSING) is _MISSING:
            raise ValueError(f"the configuration sets no {key}")
        return self._values[key]

    def sets(self, key: str) -> bool:
        """Return whether the file itself sets a key, and not only its base."""
        return key in self.assigned

    def skip(self, *keys: str) -> None:
        """Note settings that do not affect training, such as names of logs."""
        self._read |= {
            k for k in self._values if any(k == s or k.startswith(s + ".") for s in keys)
        }

    def unread(self) -> list[str]:
        """Return the settings of the file that nothing has read."""
        return [
            f"{key}: {value!r}"[:100]
            for key, value in self._values.items()
            if key in self.assigned and key not in self._read and value not in (None, "", False)
        ]


def flatten(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return nested settings by dotted keys; mappings of rewards stay whole."""
    found: list[tuple[str, Any]] = []
    for key, value in settings.items():
        name = f"{prefix}{key}"
        nested = isinstance(value, Mapping) and name not in ("reward_fn", "prompt_fn_kwargs")
        found += flatten(value, f"{name}.") if nested else [(name, value)]
    return found


def divide(total: int, count: int, what: str) -> int:
    """Return total / count; raise ValueError unless it is whole."""
    if count < 1 or total % count:
        raise ValueError(f"{what}: {total} is not divisible by {count}")
    return total // count


def find_rewards(names: Mapping[str, Any], draft: Draft) -> None:
    """Set the rewards of a draft by the names of other toolkits; list unknown names."""
    found = []
    for name, weight in names.items():
        key = name.lower().replace("_", "").replace("-", "")
        if key in _REWARDS:
            path, arguments, note = _REWARDS[key]
            reward: dict[str, Any] = {"class_path": f"reward_models.{path}"}
            found.append(
                reward | ({"init_args": arguments} if arguments else {}) | {"weight": weight}
            )
            draft.differences += [f"reward {name}: {note}"] if note else []
        else:
            draft.unsupported.append(
                f"reward {name} (weight {weight}): choose one of reward_models"
            )
    if found:
        draft.settings["rewards"] = found


_REWARDS: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "pickscore": ("PickScore", {"normalisation": "divided by 26"}, ""),
    "clipscore": ("CLIPScore", {}, ""),
    "clip": ("CLIPScore", {}, ""),
    "hpsv2": ("HPSv2", {}, ""),
    "imagereward": ("ImageReward", {}, ""),
    "aesthetic": ("Aesthetic", {}, ""),
    "jpegcompressibility": ("JpegSize", {}, "unit of the file size may differ"),
    "jpegincompressibility": (
        "JpegSize",
        {"dim": "incompressibility"},
        "unit of the file size may differ",
    ),
    "ocr": ("OCR", {}, "another text reader; prompts need the text in double quotes"),
    "videoocr": ("OCR", {}, "another text reader; prompts need the text in double quotes"),
}
"""Class, arguments and difference of the rewards of other toolkits, by name without separators."""
