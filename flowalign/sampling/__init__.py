"""Sample trajectories: the denoising loop, and the choice of stochastic and shared steps."""

from flowalign.types.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __path__)
