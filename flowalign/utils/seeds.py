"""Randomness without state: every draw is a pure function of the run's seed and of what it is for.

That is what makes a resumed run, and a run on more processes, draw the same numbers.
"""

import hashlib

import torch


def generator(seed: int, purpose: str, *index: int) -> torch.Generator:
    """A CPU generator for one purpose, for example ("noise", step, prompt)."""
    key = ":".join([str(seed), purpose, *map(str, index)])
    digest = hashlib.sha256(key.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
