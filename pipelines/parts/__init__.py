"""Contains helpers that several model families share."""
