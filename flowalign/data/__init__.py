"""Read requests and published datasets, cache latents, and prepare preference data."""

from flowalign.data.media_record import Record
from flowalign.data.preference.dataset import PreferenceDataset
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
from flowalign.data.readers import Dataset, open_dataset
from flowalign.data.requests import Requests, read_requests

__all__ = [
    "BestWorst",
    "Dataset",
    "Dominance",
    "Gap",
    "GapWeights",
    "Pair",
    "PreferenceDataset",
    "Record",
    "Requests",
    "Rule",
    "Sample",
    "Segment",
    "open_dataset",
    "read_requests",
]
