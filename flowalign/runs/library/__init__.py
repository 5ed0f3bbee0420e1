"""List the run files of the package."""
