"""Use flowalign from Python: hand over a pipeline, reward functions and prompts."""
