"""Charts and pages, made from the files that a run or a comparison wrote.

This room reads metrics, samples and records; it knows no model and no reward.
"""
