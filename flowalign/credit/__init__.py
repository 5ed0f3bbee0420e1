"""Step-level credit assignment for denoising trajectories.

A method receives a trajectory and a function that values its states.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
