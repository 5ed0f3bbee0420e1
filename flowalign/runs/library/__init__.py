"""List the run files of the package, and draft new ones from them."""
