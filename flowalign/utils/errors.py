"""Define errors that a command reports in a few lines."""

import difflib
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


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


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: the most similar known name, or else all of them."""
    names = list(known)
    near = difflib.get_close_matches(name, names, 1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names) or 'none'}"


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
