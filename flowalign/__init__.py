"""Align diffusion and flow-matching models with human preferences, one denoising step at a time."""

__version__ = "0.2.0"
