"""Train with matching losses on noised clean latents, from stored preferences or rollouts."""

from flowalign.types.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __path__)
