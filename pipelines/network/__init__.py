"""Prepares, stores, divides, speeds up and saves the networks of a pipeline."""
