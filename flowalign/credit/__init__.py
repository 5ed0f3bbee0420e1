"""Step-level credit: how much each denoising step earned. One file per method.

A method sees a trajectory and asks for values of its states; it touches nothing else.
"""

from flowalign.utils.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __path__)
