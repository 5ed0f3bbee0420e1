"""Export what a run trained."""
