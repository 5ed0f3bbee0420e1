"""The pipeline of a script is trained in place, and given back as it was."""
