"""Sample requests, value the samples and compare their rewards, for all online recipes."""
