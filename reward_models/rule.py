"""What rewards have in common that judge sample after sample by a rule, without a gradient."""

import importlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from flowalign.types import MediaBatch, RewardModel, RewardOutput, RewardSpec

Verdict = tuple[Sequence[float], Mapping[str, Any]]
"""The score of every dimension, and what else is worth telling."""


class Unscorable(Exception):
    """Why a rule says nothing about this sample. The text becomes the row's reason."""


class RuleReward(RewardModel):
    """A reward whose subclass judges one sample at a time; rows cannot touch each other."""

    spec: RewardSpec

    @abstractmethod
    def judge(self, sample: MediaBatch) -> Verdict:
        """The verdict on a batch of one that passed the screen. Unscorable where there is none."""

    @final
    def score(self, batch: MediaBatch) -> RewardOutput:
        """Judge every sample that can be judged."""
        failed = self.spec.screen(batch)
        values = torch.full((len(batch), len(self.spec.dims)), torch.nan)
        extras: list[Mapping[str, Any]] = [{} for _ in range(len(batch))]
        for i in range(len(batch)):
            if i in failed:
                continue
            try:
                scores, extras[i] = self.judge(batch.take([i]))
                values[i] = torch.tensor(scores)
            except Unscorable as reason:
                failed[i] = str(reason)
        return RewardOutput.build(self.spec, values, failed, extras=extras)


def optional(module: str, extra: str) -> Any:
    """A library that only some rewards need. ValueError naming the extra that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{module} is missing: pip install 'flowalign[{extra}]'") from error


def known(sample: MediaBatch) -> Mapping[str, Any]:
    """The further columns of a batch of one."""
    return sample.metadata[0] if sample.metadata else {}


def to_bytes(frames: Float[Tensor, "n 3 h w"]) -> UInt8[np.ndarray, "n h w 3"]:
    """The 8-bit RGB pictures that libraries for pictures want, out of [0, 1]."""
    levels = (frames.detach().float().cpu() * 255).round().clamp(0, 255)
    return levels.to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
