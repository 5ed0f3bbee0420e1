"""Wraps diffusers pipelines as flowalign policies: name a class as `pipelines.SD3` in run files."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
