"""Show all runs of a folder in a browser, also while they train: `flowalign view`."""
