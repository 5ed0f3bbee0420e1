"""Data: prompts, readers of published datasets, latents encoded once, preference data."""

from flowalign.data.preference.pair_rules import BestWorst, Dominance, Gap, Rule
from flowalign.data.preference.pairs import Pair, Sample, Segment
from flowalign.data.preference.weighting import GapWeights
from flowalign.data.prompts import Prompts, read_metadata, read_prompts
from flowalign.data.records import Record

__all__ = [
    "BestWorst",
    "Dominance",
    "Gap",
    "GapWeights",
    "Pair",
    "Prompts",
    "Record",
    "Rule",
    "Sample",
    "Segment",
    "read_metadata",
    "read_prompts",
]
