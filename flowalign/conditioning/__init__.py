"""Prompt conditioning on reward levels, reward tokens or a user."""

from flowalign.types.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __path__)
