"""Hide secrets in texts that others read: the command of `notify`, and credentials in URLs."""

import re
from collections.abc import Sequence

_SETTING = re.compile(r"(?m)^notify:.*\n(?:[ #-].*\n|\n)*")
_OPTION = re.compile(r"(?s)^((?:--)?notify=).*")
_CREDENTIALS = re.compile(r"(://)[^\s/?#]*@")


def hide_in_settings(text: str) -> str:
    """Return the YAML of a run without `notify`, and with *** instead of credentials in URLs."""
    return _CREDENTIALS.sub(r"\1***@", _SETTING.sub("", text))


def hide_in_command(words: Sequence[str]) -> list[str]:
    """Return the words of a command with *** instead of `notify` and of credentials in URLs."""
    hidden = ["***" if word == "--notify" else "" for word in ("", *words)]
    shown = [_OPTION.sub(r"\1***", word) for word in words]
    return [a or _CREDENTIALS.sub(r"\1***@", b) for a, b in zip(hidden, shown, strict=False)]
