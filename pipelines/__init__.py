"""Wraps diffusers pipelines as flowalign policies, one file per model family."""
