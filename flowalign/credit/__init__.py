"""Step-level credit: how much each denoising step earned. One file per method."""
