"""Measure credit methods, and compare runs."""
