"""Train with reward gradients, through decoded samples to chosen steps of cached rollouts."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
