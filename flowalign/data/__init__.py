"""Read requests and published datasets, cache latents, and prepare preference data."""

from flowalign.data.media_record import Record
from flowalign.data.preference.pair_rules import BestWorst, Dominance, Gap, Rule
from flowalign.data.preference.preference_data import Pair, Sample, Segment
from flowalign.data.preference.weighting import GapWeights
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
