"""Define errors that the user can correct."""

from collections.abc import Iterator
from contextlib import contextmanager


class ConfigError(ValueError):
    """Names a run file, option or override that cannot be used, and what is allowed."""


@contextmanager
def convert_value_errors(prefix: str = "") -> Iterator[None]:
    """Raise ConfigError for a ValueError within, for code whose ValueErrors the user can correct.

    It is a context manager, and a decorator of functions.
    """
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{prefix}{error}") from error
