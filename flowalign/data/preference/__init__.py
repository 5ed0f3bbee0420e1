"""Validate, weight, sample and collate preference data: pairs and labelled samples."""
