"""Wraps any diffusers pipeline as a policy by replaying its own denoising loop."""
