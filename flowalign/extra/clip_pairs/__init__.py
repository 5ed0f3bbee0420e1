"""Make training pairs from real videos, by noising and denoising them."""
