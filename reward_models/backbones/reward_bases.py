"""Implements base classes of rewards, computed by a torch network or by a rule for each sample."""

import re
from abc import abstractmethod
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeVar, final

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from typing_extensions import override

from flowalign.types import (
    JudgeCalls,
    Loadable,
    MediaBatch,
    PositiveInt,
    RewardModel,
    RewardOutput,
    RewardSpec,
    score_usable,
)

T = TypeVar("T")


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


class Unscorable(ValueError):
    """Raised if a sample cannot be scored; its text becomes the sample's reason."""


class ScreenedReward(RewardModel):
    """Reward of which a subclass rates only samples that passed its screen and its examination."""

    spec: RewardSpec

    def examine(self, sample: MediaBatch) -> None:
        """Raise Unscorable if a sample cannot be scored although it passed the screen of the spec.

        A model that loads is loaded.
        """

    @abstractmethod
    def rate(self, batch: MediaBatch) -> Float[Tensor, "n R"] | BatchScores:
        """Score samples that passed."""

    def rate_all(self, batch: MediaBatch) -> RewardOutput:
        """Score any number of samples that passed."""
        rated = self.rate(batch)
        if isinstance(rated, Tensor):
            return RewardOutput.build(self.spec, rated)
        return RewardOutput.build(self.spec, **vars(rated))

    @final
    def score(self, batch: MediaBatch) -> RewardOutput:
        """Score the samples that can be scored; failed rows have no gradient."""
        failed = self.spec.screen(batch)
        if isinstance(self, Loadable) and len(failed) < len(batch):
            self.load()
        failed |= collect(batch, self.examine, failed)[1]
        with torch.set_grad_enabled(batch.media.requires_grad):
            return score_usable(self.spec, batch, failed, self.rate_all)


def collect(
    batch: MediaBatch, make: Callable[[MediaBatch], T], without: Container[int] = ()
) -> tuple[dict[int, T], dict[int, str]]:
    """Return what is made of each sample, and why the others are Unscorable."""
    made: dict[int, T] = {}
    failed: dict[int, str] = {}
    for i in (i for i in range(len(batch)) if i not in without):
        try:
            made[i] = make(batch.take([i]))
        except Unscorable as reason:
            failed[i] = str(reason)
    return made, failed


@dataclass(eq=False, repr=False)
class NetworkReward(ScreenedReward, Loadable):
    """Reward with a network that a subclass loads in `read` and applies in `rate`.

    Its fields are its settings, from which `declare` makes the spec. Weights are read by `load`, or
    by the first `score`. `device` is a torch device or `auto`. With `offload` the network stays in
    main memory between calls. Differentiable models keep the gradient of samples that require one.
    """

    _: KW_ONLY
    device: str = "auto"
    batch_size: PositiveInt = 32
    offload: bool = False
    rates_whole_batches: ClassVar[bool] = False
    """Whether `rate` itself divides the work by `batch_size`, so that groups stay whole."""
    network: Any = field(init=False)
    """Network that `read` returned; a subclass may declare its type."""

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.place, self.spec = choose_device(self.device), self.declare()

    @abstractmethod
    def declare(self) -> RewardSpec:
        """Return the declaration of the model with its settings."""

    @abstractmethod
    def read(self) -> nn.Module:
        """Return the network with its weights, on the CPU.

        Raises:
            ValueError: A checkpoint does not fit.
        """

    @abstractmethod
    @override
    def rate(self, batch: MediaBatch) -> Float[Tensor, "n R"] | BatchScores:
        """Score samples that passed; `self.network` is on `self.place`."""

    @final
    def load(self) -> None:
        """Read the weights."""
        require_device(self.place)
        self.network = self.read().eval().requires_grad_(False)
        if not self.offload:
            self.network.to(self.place)

    @final
    @override
    def rate_all(self, batch: MediaBatch) -> RewardOutput:
        """Score samples that passed, `batch_size` at a time."""
        if self.offload:
            self.network.to(self.place)
        chunks = [batch] if self.rates_whole_batches else batch.chunks(self.batch_size)
        rated = RewardOutput.concat([*map(super().rate_all, chunks)])
        if self.offload and not rated.values.requires_grad:  # backward needs weights on the device
            self.network.to("cpu")
        return rated


def derive_spec(inner: RewardSpec, suffix: str, how: str, **changes: Any) -> RewardSpec:
    """Return the spec of scores that are made from those of another reward.

    The suffix is added to the names, and `how` to the version.
    """
    dims = tuple(f"{dim}_{suffix}" for dim in inner.dims)
    version = f"{inner.fingerprint()}; {how}"
    return replace(inner, name=f"{inner.name}_{suffix}", dims=dims, version=version, **changes)


Verdict = (
    tuple[Sequence[float], Mapping[str, Any]] | tuple[Sequence[float], Mapping[str, Any], Tensor]
)
"""Score of every dimension, further results for the extras and, if the spec has maps, a map."""


class RuleReward(ScreenedReward):
    """Reward that scores each sample separately by a rule, which a subclass defines."""

    @abstractmethod
    def judge(self, sample: MediaBatch) -> Verdict:
        """Score a batch of one that passed the screen; raise Unscorable if the rule cannot."""

    @final
    @override
    def rate(self, batch: MediaBatch) -> BatchScores:
        """Score every sample that can be scored."""
        values = torch.full((len(batch), len(self.spec.dims)), torch.nan)
        extras: list[Mapping[str, Any]] = [{} for _ in range(len(batch))]
        places = torch.full((len(batch), *batch.media.shape[-2:]), torch.nan)
        verdicts, failed = collect(batch, self.judge)
        for i, (scores, extras[i], *place) in verdicts.items():
            values[i] = torch.tensor(scores)
            places[i : i + 1] = place[0] if place else torch.nan
        return BatchScores(values, None, failed, places if self.spec.maps else None, extras)


class YesNoJudge(Loadable):
    """Answers any question about images or videos with a probability of yes."""

    version: str
    """Identifier of its weights and settings; part of the fingerprint of rewards that use it."""
    video_needs: tuple[Literal["fps"], ...] = ()
    """Fields that a batch of videos needs in addition to its frames."""
    silence: str = "the judge gave no answer"
    """Reason of the NaN answers of the last `ask`."""

    def calls(self, questions: int) -> JudgeCalls:  # noqa: ARG002 (for overrides)
        """Return what a chat model costs to answer this number of questions. Default: nothing."""
        return JudgeCalls()

    @abstractmethod
    def ask(
        self, batch: MediaBatch, questions: Sequence[Sequence[str]]
    ) -> Float[Tensor, "n questions"]:
        """Return P(yes) for the questions about each sample; NaN if the judge gave no answer."""


class Composed(RewardModel, Loadable):
    """Reward made of other models, its attributes: it loads them and has their caveats."""

    def load(self) -> None:
        """Load the models."""
        for part in vars(self).values():
            if isinstance(part, Loadable):
                part.load()

    @property
    @override
    def caveat(self) -> str:
        """Return the caveats of the models."""
        parts = [one for one in vars(self).values() if isinstance(one, RewardModel | Loadable)]
        return "; ".join(filter(None, dict.fromkeys(part.caveat for part in parts)))


def metadata_of(sample: MediaBatch) -> Mapping[str, Any]:
    """Return the metadata of a batch of one."""
    return sample.metadata[0] if sample.metadata else {}


def to_uint8(frames: Float[Tensor, "n 3 h w"]) -> UInt8[np.ndarray, "n h w 3"]:
    """Convert images in [0, 1] to 8-bit RGB arrays for image libraries."""
    levels = (frames.detach().float().cpu() * 255).round().clamp(0, 255)
    return levels.to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
