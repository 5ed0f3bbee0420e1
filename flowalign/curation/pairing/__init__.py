"""Choose training pairs by the scores of samples of the same prompt."""
