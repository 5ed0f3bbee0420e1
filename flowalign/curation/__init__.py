"""Curation makes preference data: it scores and pairs samples, or regenerates real videos."""

from flowalign.curation.clip_pairs.dense_dpo import DensePairs
from flowalign.curation.clip_pairs.local_dpo import LocalPairs

__all__ = ["DensePairs", "LocalPairs"]
