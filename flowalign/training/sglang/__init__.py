"""Sample rollouts on SGLang-Diffusion servers."""

from flowalign.training.sglang.pool import SGLangPool

__all__ = ["SGLangPool"]
