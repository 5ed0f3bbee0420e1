"""Start a run in its directory, and train it."""
