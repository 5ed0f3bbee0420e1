"""Curation makes preference data: it scores and pairs samples, or regenerates real videos."""

from flowalign.curation.clip_pairs.dense_pairs import DensePairs
from flowalign.curation.clip_pairs.local_pairs import LocalPairs

__all__ = ["DensePairs", "LocalPairs"]
