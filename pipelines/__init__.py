"""Diffusers pipelines as flowalign policies, one file per family."""
