"""What the user can correct."""


class ConfigError(ValueError):
    """A run file, an option or an override that cannot be used: which value, what is allowed."""
