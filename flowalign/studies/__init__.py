"""Measures credit methods and compares runs."""
