"""Makes pairs to train on from real clips, by noising and denoising them."""
