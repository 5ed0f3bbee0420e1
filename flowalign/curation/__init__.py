"""Curation makes preference data: it scores and pairs samples, and collects votes."""
