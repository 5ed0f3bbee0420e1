"""What reward models are given and return. Import these from `flowalign.types`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class MediaBatch:
    """What a reward model is given."""

    media: Float[Tensor, "n F 3 H W"]
    """In [0, 1]; an image is a video of one frame."""
    prompts: Sequence[str]
    metadata: Sequence[Mapping[str, Any]] = ()
    """Further columns of the prompt's row, one mapping per sample, or empty."""


@dataclass(frozen=True)
class RewardSpec:
    """What a reward model declares about itself."""

    name: str
    dims: tuple[str, ...]
    """Names of the R columns, higher is better in each."""
    modality: Literal["image", "video", "any"]
    scale: tuple[float, float]
    """Lowest and highest value that any dimension can take; infinite where unbounded."""
    licence: str
    differentiable: bool = False


@dataclass(frozen=True)
class RewardOutput:
    """Scores of n samples. One that could not be computed is NaN, not valid, and has a reason."""

    values: Float[Tensor, "n R"]
    valid: Bool[Tensor, "n R"]
    reasons: Mapping[int, str] = field(default_factory=dict)
    """Sample index to why it failed; every sample with an invalid dimension has one."""

    @staticmethod
    def build(
        spec: RewardSpec, values: Tensor, failed: Mapping[int, str] | None = None
    ) -> "RewardOutput":
        """Mark failed samples, and any non-finite value that a model returned, as invalid."""
        failed = dict(failed or {})
        values = values.detach().float().cpu().clone()
        if values.ndim != 2 or values.shape[1] != len(spec.dims):
            raise ValueError(
                f"reward {spec.name!r} returned shape {tuple(values.shape)}, "
                f"expected (n, {len(spec.dims)}) for {spec.dims}"
            )
        values[list(failed)] = torch.nan
        valid = values.isfinite()
        for i in (~valid).any(1).nonzero().flatten().tolist():
            names = [dim for dim, ok in zip(spec.dims, valid[i].tolist(), strict=True) if not ok]
            failed.setdefault(i, f"{spec.name} returned a non-finite value for {', '.join(names)}")
        return RewardOutput(values.masked_fill(~valid, torch.nan), valid, failed)


class RewardModel(ABC):
    """Scores media in [0, 1] against prompts. Implementations live in `reward_models/`."""

    spec: RewardSpec

    @abstractmethod
    def score(self, batch: MediaBatch) -> RewardOutput:
        """One row per sample, independent of the other samples in the batch."""
