"""Prepares, stores, shards, accelerates and saves the networks of a pipeline."""
