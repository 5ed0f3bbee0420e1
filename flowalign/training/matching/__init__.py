"""Train with matching losses on noised clean latents, from stored preferences or rollouts."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
