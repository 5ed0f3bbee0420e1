"""Encode media and prompts once, and cache the results on disk."""
