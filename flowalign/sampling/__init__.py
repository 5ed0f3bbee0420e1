"""Sample trajectories: the denoising loop, and the choice of stochastic and shared steps."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
