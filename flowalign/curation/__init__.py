"""Curation: preference data made. Media are scored, paired, or noised and denoised into pairs."""

from flowalign.curation.clip_pairs.dense_dpo import DensePairs
from flowalign.curation.clip_pairs.local_dpo import LocalPairs

__all__ = ["DensePairs", "LocalPairs"]
