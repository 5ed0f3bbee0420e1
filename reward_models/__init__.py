"""Contains the reward models: name a class as `reward_models.PickScore` in run files."""

from flowalign.types.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __path__)
