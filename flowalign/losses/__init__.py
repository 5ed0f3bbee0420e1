"""Losses that update a policy from denoising transitions. One file per loss."""
