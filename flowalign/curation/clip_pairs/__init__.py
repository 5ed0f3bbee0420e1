"""Pairs to train on that are made of real clips, by noising and denoising them."""
