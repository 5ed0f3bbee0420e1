"""Small helpers: files, seeds, console, metrics, costs, subprocesses, YAML.

This room knows no model and no reward; of the other rooms it knows the ranges of settings.
"""
