"""Small helpers: files, seeds, console, metrics, costs, subprocesses, YAML.

This room is the lowest: it knows no model, no reward and no other room.
"""
