"""Helpers that several model families share."""
