"""Contains the reward models: name a class as `reward_models.PickScore` in run files."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
