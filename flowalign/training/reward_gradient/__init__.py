"""Train with reward gradients, through decoded samples to chosen steps of cached rollouts."""

from flowalign.types.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __path__)
