"""Wraps diffusers pipelines as flowalign policies: name a class as `pipelines.SD3` in run files."""

from flowalign.types.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __path__)
