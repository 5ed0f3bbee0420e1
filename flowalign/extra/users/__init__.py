"""Condition policies on users, by embeddings of a few of their choices (PPD)."""
