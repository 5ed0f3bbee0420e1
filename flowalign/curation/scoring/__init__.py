"""Scores preference datasets and folders of media at scale, for `flowalign score`."""
