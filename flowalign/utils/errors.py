"""Define errors that a command reports in a few lines."""

from collections.abc import Iterator
from contextlib import contextmanager


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
