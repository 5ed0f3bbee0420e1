"""Rare systems that few run files use. They import the other rooms, which never import them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
