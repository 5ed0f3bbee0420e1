"""Encodes media and prompts once, and caches the results on disk."""
