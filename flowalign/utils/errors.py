"""Define errors that a command reports in a few lines."""

import difflib
import json
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from operator import attrgetter
from pathlib import Path
from textwrap import shorten
from typing import Any

_LONGEST = 300
"""Largest number of characters of a quoted error, and of a list of names."""


class ConfigError(ValueError):
    """Error in a run file, option or override; the message names the allowed values."""


class RunFailure(RuntimeError):
    """Failure of a run that a short message explains."""


@contextmanager
def convert_value_errors(prefix: str = "") -> Iterator[None]:
    """Convert ValueErrors inside the context to ConfigErrors, for errors that users can correct.

    It is a context manager and a function decorator.
    """
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{prefix}{error}") from error


@contextmanager
def explain_errors(
    prefix: str, *kinds: type[Exception], to: Callable[[str], Exception] = ValueError
) -> Iterator[None]:
    """Convert errors of these kinds inside the context to errors that begin with a prefix.

    The text of an error is shortened to a line; without kinds, those of ValueErrors are kept.
    """
    caught = kinds or (ValueError,)
    try:
        yield
    except caught as error:
        text = " ".join(str(error).split())[:_LONGEST] if kinds else str(error)
        if not text or isinstance(error, LookupError | TypeError | AttributeError):
            text = f"{type(error).__name__} {text}"
        raise to(f"{prefix}: {text}") from error


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: the most similar known name, if any, and all of them."""
    names = list(known)
    near = difflib.get_close_matches(name, names, 1)
    there = shorten(", ".join(names) or "none", _LONGEST, placeholder=" ...")
    return f"did you mean {near[0]!r}? There are {there}" if near else f"there are {there}"


def require_known(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise ValueError for the first unknown name; `what` says what names it."""
    there = list(known)
    for name in names:
        if name not in there:
            raise ValueError(f"{what} {name!r}; {suggest_name(str(name), map(str, there))}")


def require_default(settings: Any, key: str, reason: str, *names: str) -> None:
    """Raise ValueError for the first of these settings that differs from its default.

    Names are relative to `key`, the key of the settings in run files, and may have dots.
    """
    for name in names:
        group, _, last = name.rpartition(".")
        owner = attrgetter(group)(settings) if group else settings
        value, default = getattr(owner, last), _find_default(owner, last)
        if value != default:
            shown, usual = map(_show_value, (value, default))
            message = f"{key}.{name} is {shown}, but {reason}: set {last} to {usual}"
            raise ValueError(message.removeprefix("."))


def refuse_conflicts(
    settings: Any, key: str, conflicts: Mapping[str, tuple[str, Sequence[str]]]
) -> None:
    """Raise ValueError for settings that another one excludes.

    `conflicts` has what a setting does, and the settings that it excludes, by its name.
    """
    for name, (effect, others) in conflicts.items():
        value = getattr(settings, name)
        if value != _find_default(settings, name):
            require_default(settings, key, f"{name} {_show_value(value)} {effect}", *others)


def _find_default(owner: Any, name: str) -> Any:
    (found,) = (one for one in fields(owner) if one.name == name)
    return found.default if found.default_factory is MISSING else found.default_factory()


def _show_value(value: Any) -> str:
    """Return a value as run files have it; the class of an object."""
    if isinstance(value, bool | None):
        return json.dumps(value)
    plain = isinstance(value, str | int | float | Sequence | Mapping)
    return str(value) if plain else type(value).__name__


def describe_error(error: BaseException, own: str | None = None) -> str:
    """Return type, message and place of an error, if possible in the file `own` or a user's file.

    The message is cut after its first line.
    """
    frames = traceback.extract_tb(error.__traceback__)
    paths = sysconfig.get_paths()
    libraries = "<", str(Path(__file__).parents[1]), paths["stdlib"], paths["purelib"]
    users = [f for f in frames if f.filename == own or not f.filename.startswith(libraries)]
    place = (users or frames)[-1]
    message = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {message:.300} ({place.filename}:{place.lineno})"


class TrainingFailure(RunFailure):
    """Error that stops training: it cannot continue, or an automatic check failed."""
