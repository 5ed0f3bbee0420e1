"""Sample requests, value the samples and compare their rewards: what online trainings share."""
