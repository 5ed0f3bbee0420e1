"""Measure signal and noise of each denoising step's gradient, and compare settings by them."""
