"""Ask a policy with more than the prompt: levels of rewards, words of rewards, or a person."""

from flowalign.utils.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __path__)
