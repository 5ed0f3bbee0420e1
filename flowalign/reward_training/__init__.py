"""Trains reward models, and measures how well scores agree with people."""
