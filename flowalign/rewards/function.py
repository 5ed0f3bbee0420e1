"""Use a plain Python function as a reward model."""

import copy
import hashlib
import importlib
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flowalign.types import MediaBatch, RewardModel, RewardOutput, RewardSpec
from flowalign.types.ranges import ImportPath
from flowalign.utils.local_modules import FIRST_PARAMETERS

_PARAMETERS = ("prompts", "metadata")


class FunctionReward(RewardModel):
    """Reward model that calls `def reward(images, prompts) -> list[float]`.

    A run file names the function as `class_path: my_reward.py:reward`. `images` are float32 RGB
    [n, 3, H, W] in [0, 1]. If the first parameter is `videos`, the function gets [n, F, 3, H, W].
    An optional parameter `metadata` gets a mapping per sample. All are copies. The function returns
    a score per sample, higher is better; a score of NaN or None counts as failed. There is no
    gradient.

    Args:
        function: Dotted path of the function. Its name is also the name of the reward dimension.
    """

    def __init__(self, function: ImportPath):
        self._function = _import_function(function)
        names = list(inspect.signature(self._function).parameters)
        name = self._function.__name__
        unknown = [n for n in names[1:] if n not in _PARAMETERS]
        if not names or names[0] not in FIRST_PARAMETERS or unknown:
            raise ValueError(
                f"{function} takes ({', '.join(names)}); a reward function takes "
                f"{' or '.join(FIRST_PARAMETERS)}, then any of {', '.join(_PARAMETERS)}"
            )
        self._takes_videos, self._names = names[0] == "videos", names[1:]
        self.spec = RewardSpec(
            name=name,
            dims=(name,),
            modality="any" if self._takes_videos else "image",
            scale=(-math.inf, math.inf),
            licence="unknown",
            version=_digest_source(self._function),
        )

    def score(self, batch: MediaBatch) -> RewardOutput:
        """Score all samples in one call."""
        failed = self.spec.screen(batch)
        good = [i for i in range(len(batch)) if i not in failed]
        values = torch.full((len(batch), 1), torch.nan, dtype=torch.float32)
        if good:
            scores = self._call(batch.take(good))
            for i, score in zip(good, scores, strict=True):
                values[i] = math.nan if score is None else float(score)
        return RewardOutput.build(self.spec, values, failed)

    def _call(self, batch: MediaBatch) -> Sequence[Any]:
        # Copies, because functions change what they get, and other rewards score the same batch.
        media = batch.media.detach().to(torch.float32, copy=True)
        metadata = [copy.deepcopy(dict(one)) for one in batch.metadata]
        known = {
            "prompts": list(batch.prompts),
            "metadata": metadata or [{} for _ in batch.prompts],
        }
        first = media if self._takes_videos else media[:, 0]
        scores = self._function(first, **{name: known[name] for name in self._names})
        scores = scores.flatten().tolist() if isinstance(scores, Tensor) else list(scores)
        if len(scores) != len(batch):
            raise ValueError(
                f"reward function {self.spec.name} returned {len(scores)} scores for "
                f"{len(batch)} samples"
            )
        return scores


def _import_function(path: str) -> Callable[..., Any]:
    module, _, name = path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name, None)
    except (ImportError, ValueError) as error:
        raise ValueError(f"function {path!r} cannot be imported: {error}") from error
    if not callable(function):
        raise ValueError(f"function {path!r} is no function")
    return function


def _digest_source(function: Callable[..., Any]) -> str:
    """Return a hash of the source, so that scores of different versions are not mixed."""
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        source = function.__qualname__
    return hashlib.sha256(source.encode()).hexdigest()[:16]
