"""Define errors that the user can correct."""

from collections.abc import Iterator
from contextlib import contextmanager


class ConfigError(ValueError):
    """Error in a run file, option or override; the message names the allowed values."""


@contextmanager
def convert_value_errors(prefix: str = "") -> Iterator[None]:
    """Convert ValueErrors inside the context to ConfigErrors, for errors that users can correct.

    It is a context manager and a function decorator.
    """
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{prefix}{error}") from error
