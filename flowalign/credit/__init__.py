"""Step-level credit assignment for denoising trajectories, one file per method.

A method receives a trajectory and a function that values its states.
"""

from flowalign.types.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __path__)
