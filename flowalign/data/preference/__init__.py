"""Validates, weights, samples and collates preference data: pairs, and samples with labels."""
