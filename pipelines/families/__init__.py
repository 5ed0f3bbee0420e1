"""Wraps one model family of diffusers per file."""
