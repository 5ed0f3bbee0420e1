"""Collect votes of annotators on samples, in a browser."""
