"""Read requests and published datasets, cache latents, and prepare preference data."""

from flowalign.data.media_record import Record
from flowalign.data.preference.preference_data import (
    BestWorst,
    Dominance,
    Gap,
    GapWeights,
    Pair,
    Rule,
    Sample,
    Segment,
)
from flowalign.data.requests import Requests, read_requests

__all__ = [
    "BestWorst",
    "Dominance",
    "Gap",
    "GapWeights",
    "Pair",
    "Record",
    "Requests",
    "Rule",
    "Sample",
    "Segment",
    "read_requests",
]
