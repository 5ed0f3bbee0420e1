"""Paths on which the gradient of a reward reaches the policy. One file per method."""

from flowalign.types.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __path__)
