"""Provide helpers for files, seeds, console, metrics, costs, subprocesses and YAML.

This package must not import models or rewards. From other packages it only uses the ranges of
settings.
"""
