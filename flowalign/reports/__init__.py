"""Charts and pages, made from the files that a run or a comparison wrote.

This package reads metrics, samples and records. It imports no model and no reward.
"""
