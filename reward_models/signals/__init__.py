"""Contains rewards that are computed from pixels, motion or features."""
