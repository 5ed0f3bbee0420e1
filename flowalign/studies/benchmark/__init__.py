"""Evaluate models on named benchmarks, as their protocol cards describe."""
