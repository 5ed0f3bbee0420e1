"""Export trained weights."""
