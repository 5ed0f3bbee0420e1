"""Implements base classes of rewards, computed by a torch network or by a rule for each sample."""

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from typing_extensions import override

from flowalign.types import Loadable, MediaBatch, PositiveInt, RewardModel, RewardOutput, RewardSpec


def choose_device(device: str) -> torch.device:
    """Return a torch device; `auto` is the GPU if there is one, else the CPU.

    Raises:
        ValueError: The text names no device.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"(cpu|cuda|mps|xpu)(:\d+)?", device):
        raise ValueError(f"device is {device!r}; it must be auto, cpu, cuda or cuda:N")
    return torch.device(device)


def require_device(device: torch.device) -> None:
    """Raise ValueError if a network cannot be moved to the device; call it before weights load."""
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device of a reward is {device}, but this machine has {torch.cuda.device_count()} "
            "CUDA GPUs: set it to auto or cpu"
        )


@dataclass(frozen=True)
class BatchScores:
    """Scores that `rate` returns together with uncertainties and failures."""

    values: Float[Tensor, "n R"]
    uncertainty: Float[Tensor, "n R"] | None = None
    """Standard deviation of each score; None if the model has no uncertainties."""
    failed: Mapping[int, str] = field(default_factory=dict)
    """Samples of this batch that could not be scored, with the reason."""
    places: Float[Tensor, "n *place"] | None = None
    """Value of every position of each sample; None if the model returns no maps."""
    extras: Sequence[Mapping[str, Any]] = ()
    """Further results of each sample, or empty."""


class ScreenedReward(RewardModel):
    """Reward of which a subclass rates only the samples that passed the screen of its spec."""

    spec: RewardSpec

    @abstractmethod
    def rate(self, batch: MediaBatch) -> Float[Tensor, "n R"] | BatchScores:
        """Score samples that passed the screen."""

    def rate_all(self, batch: MediaBatch) -> BatchScores:
        """Score any number of samples that passed the screen."""
        rated = self.rate(batch)
        return rated if isinstance(rated, BatchScores) else BatchScores(rated)

    @final
    def score(self, batch: MediaBatch) -> RewardOutput:
        """Score the samples that can be scored; failed rows have no gradient."""
        failed = self.spec.screen(batch)
        good = [i for i in range(len(batch)) if i not in failed]
        if not good:
            nothing = torch.full((len(batch), len(self.spec.dims)), torch.nan)
            return RewardOutput.build(self.spec, nothing, failed)
        with torch.set_grad_enabled(batch.media.requires_grad):
            rated = self.rate_all(batch.take(good))
            values, stds, maps = (
                None if part is None else place_rows(part, good, len(batch))
                for part in (rated.values, rated.uncertainty, rated.places)
            )
        assert values is not None
        failed |= {good[i]: reason for i, reason in rated.failed.items()}
        extras = dict(zip(good, rated.extras, strict=False))
        told = [extras.get(i, {}) for i in range(len(batch))] if extras else ()
        return RewardOutput.build(self.spec, values, failed, stds, told, maps)


class NetworkReward(ScreenedReward, Loadable):
    """Reward with a network that a subclass loads in `read` and applies in `rate`.

    The constructor is cheap; weights are read by `load`, or by the first `score`. `device` is a
    torch device or `auto`. With `offload` the network stays in main memory between calls.
    Differentiable models keep the gradient of samples that require one.
    """

    network: Any
    """Network that `read` returned; a subclass may declare its type."""

    def __init__(
        self,
        spec: RewardSpec,
        device: str = "auto",
        batch_size: PositiveInt = 32,
        offload: bool = False,
    ):
        self.spec, self.batch_size, self.offload = spec, batch_size, offload
        self.device = choose_device(device)
        self._loaded = False

    @abstractmethod
    def read(self) -> nn.Module:
        """Return the network with its weights, on the CPU.

        Raises:
            ValueError: A checkpoint does not fit.
        """

    @abstractmethod
    @override
    def rate(self, batch: MediaBatch) -> Float[Tensor, "n R"] | BatchScores:
        """Score samples that passed the screen; `self.network` is on `self.device`."""

    @final
    def load(self) -> None:
        """Read the weights once."""
        if self._loaded:
            return
        require_device(self.device)
        self.network = self.read().eval().requires_grad_(False)
        if not self.offload:
            self.network.to(self.device)
        self._loaded = True

    @final
    @override
    def rate_all(self, batch: MediaBatch) -> BatchScores:
        """Score samples that passed the screen, `batch_size` at a time."""
        self.load()
        if self.offload:
            self.network.to(self.device)
        rated = _concat([*map(super().rate_all, batch.chunks(self.batch_size))])
        if self.offload and not rated.values.requires_grad:  # backward needs weights on the device
            self.network.to("cpu")
        return rated


def _concat(parts: Sequence[BatchScores]) -> BatchScores:
    """Concatenate the results of several chunks."""
    failed: dict[int, str] = {}
    num = 0
    for part in parts:
        failed |= {num + i: reason for i, reason in part.failed.items()}
        num += len(part.values)
    stds = [part.uncertainty for part in parts if part.uncertainty is not None]
    maps = [part.places for part in parts if part.places is not None]
    values = torch.cat([part.values for part in parts])
    uncertainty = torch.cat(stds) if stds else None
    return BatchScores(values, uncertainty, failed, torch.cat(maps) if maps else None)


def place_rows(
    table: Float[Tensor, "m *R"], rows: Sequence[int], num: int
) -> Float[Tensor, "n *R"]:
    """Return `num` rows of NaN, on the CPU, with the m rows of `table` placed at `rows`."""
    places = torch.full((num, *table.shape[1:]), torch.nan)
    return places.index_put((torch.tensor(rows, dtype=torch.long),), table.float().cpu())


Verdict = (
    tuple[Sequence[float], Mapping[str, Any]] | tuple[Sequence[float], Mapping[str, Any], Tensor]
)
"""Score of every dimension, further results for the extras and, if the spec has maps, a map."""


class Unscorable(Exception):
    """Raised if a rule cannot score a sample; its text becomes the sample's reason."""


class RuleReward(RewardModel):
    """Reward that scores each sample separately by a rule, which a subclass defines."""

    spec: RewardSpec

    @abstractmethod
    def judge(self, sample: MediaBatch) -> Verdict:
        """Score a batch of one that passed the screen; raise Unscorable if the rule cannot."""

    @final
    def score(self, batch: MediaBatch) -> RewardOutput:
        """Score every sample that can be scored."""
        failed = self.spec.screen(batch)
        values = torch.full((len(batch), len(self.spec.dims)), torch.nan)
        extras: list[Mapping[str, Any]] = [{} for _ in range(len(batch))]
        places = torch.full((len(batch), *batch.media.shape[-2:]), torch.nan)
        for i in range(len(batch)):
            if i in failed:
                continue
            try:
                scores, extras[i], *place = self.judge(batch.take([i]))
                values[i] = torch.tensor(scores)
                places[i : i + 1] = place[0] if place else torch.nan
            except Unscorable as reason:
                failed[i] = str(reason)
        painted = places if self.spec.maps else None
        return RewardOutput.build(self.spec, values, failed, extras=extras, places=painted)


def metadata_of(sample: MediaBatch) -> Mapping[str, Any]:
    """Return the metadata of a batch of one."""
    return sample.metadata[0] if sample.metadata else {}


def to_uint8(frames: Float[Tensor, "n 3 h w"]) -> UInt8[np.ndarray, "n h w 3"]:
    """Convert images in [0, 1] to 8-bit RGB arrays for image libraries."""
    levels = (frames.detach().float().cpu() * 255).round().clamp(0, 255)
    return levels.to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
