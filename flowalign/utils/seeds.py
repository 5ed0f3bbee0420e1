"""Make random draws stateless: each draw is a pure function of the run's seed and a purpose.

A resumed run and a run on more processes therefore draw the same numbers: checkpoints contain no
generator state, and noise belongs to a prompt, on any process. accelerate's `save_state` does not
cover the order of the data, so a run restored by it differed from an uninterrupted one.
"""

import hashlib
import random
from collections.abc import Sequence
from functools import lru_cache

import torch


def generator(seed: int, purpose: str, *index: int) -> torch.Generator:
    """Return a CPU generator for one purpose, for example ("noise", step, prompt)."""
    key = ":".join([str(seed), purpose, *map(str, index)])
    digest = hashlib.sha256(key.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


@lru_cache(maxsize=8)
def shuffle(key: str, count: int) -> Sequence[int]:
    """Return the numbers below `count` in a random order that depends on `key`."""
    order = list(range(count))
    random.Random(key).shuffle(order)
    return order


def is_in_share(text: str, share: float, seed: int) -> bool:
    """Return whether a text falls in a share of all texts, by a hash of text and seed."""
    digest = hashlib.blake2b(f"{seed} {text}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) < share * 2**64
