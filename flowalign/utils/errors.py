"""Define errors that the user can correct."""


class ConfigError(ValueError):
    """Names a run file, option or override that cannot be used, and what is allowed."""
