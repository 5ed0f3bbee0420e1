"""Reads the prompts of judges: text with slots for words and images."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowalign.utils.files import bundled

_FOLDER = Path(__file__).parent / "prompts"
_SLOT = re.compile(r"\{(prompt|media|references|first|second|task|criterion|question)\}")
_USER = "\n=== user ===\n"


@dataclass(frozen=True)
class Template:
    """Text of a user prompt, with an optional system prompt."""

    user: str
    system: str = ""

    def render(self, **slots: str | Sequence[str]) -> list[dict[str, Any]]:
        """Return the messages, with words and images (data URLs) inserted into their slots.

        The content of a slot is not searched for slots, because a prompt may contain `{media}`.
        """
        parts: list[dict[str, Any]] = []
        for i, piece in enumerate(_SLOT.split(self.user)):
            value = piece if i % 2 == 0 else slots[piece]
            for item in [value] if isinstance(value, str) else value:
                _append(parts, item, picture=not isinstance(value, str))
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": parts}]


def read_template(source: str, slots: Sequence[str], optional: Sequence[str] = ()) -> Template:
    """Read a bundled prompt by its name, or another prompt by its path.

    Raises:
        ValueError: It does not exist, lacks one of the slots, or has an unknown slot.
    """
    own, ours = Path(bundled(source)), _FOLDER / f"{source}.txt"
    path = ours if ours.is_file() else own
    if not path.is_file():
        names = sorted(p.stem for p in _FOLDER.glob("*.txt"))
        raise ValueError(f"template {source!r} is neither a file nor one of {names}")
    system, _, user = path.read_text().rpartition(_USER)
    found = set(_SLOT.findall(user))
    if found - {*slots, *optional} or set(slots) - found:
        raise ValueError(
            f"template {source} has the slots {sorted(found)}; "
            f"it must have {sorted(slots)} and may have {sorted(optional)}"
        )
    return Template(user, system)


def describe(template: Template) -> Mapping[str, str]:
    """Return the parts of a template that affect scores, for a fingerprint."""
    return {"system": template.system, "user": template.user}


def _append(parts: list[dict[str, Any]], item: str, picture: bool) -> None:
    if picture:
        parts.append({"type": "image_url", "image_url": {"url": item}})
    elif parts and parts[-1]["type"] == "text":
        parts[-1]["text"] += item
    elif item:
        parts.append({"type": "text", "text": item})
