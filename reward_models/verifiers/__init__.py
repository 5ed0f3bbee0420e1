"""Contains rewards of the toy models, which check an image by rule."""
