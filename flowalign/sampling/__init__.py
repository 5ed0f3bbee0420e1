"""Sample trajectories: the one denoising loop, and which of its steps are random or shared."""

from flowalign.utils.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __path__)
