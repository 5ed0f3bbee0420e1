"""Show all runs of a folder in a browser, while they go: `flowalign view`."""
