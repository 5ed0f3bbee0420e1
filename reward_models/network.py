"""What all rewards that a torch network computes have in common: loading, placement, chunks."""

from abc import abstractmethod
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from flowalign.types import Loadable, MediaBatch, RewardModel, RewardOutput, RewardSpec


class NetworkReward(RewardModel, Loadable):
    """A reward whose subclass says how to `read` its network and how to `rate` a batch with it.

    The constructor is cheap; weights are read by `load`, or when first asked. `device` is a torch
    device or `auto`; with `offload` the network waits in main memory between two calls.
    Differentiable models keep the gradient of media that require one.
    """

    network: nn.Module

    def __init__(
        self, spec: RewardSpec, device: str = "auto", batch_size: int = 32, offload: bool = False
    ):
        if batch_size < 1:
            raise ValueError(f"batch_size of {spec.name} is {batch_size}; it must be at least 1")
        self.spec, self.batch_size, self.offload = spec, batch_size, offload
        self.device = torch.device(
            ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        )
        self._loaded = False

    @abstractmethod
    def read(self) -> nn.Module:
        """The network with its weights, on the CPU. ValueError where a checkpoint is not right."""

    @abstractmethod
    def rate(self, batch: MediaBatch) -> Float[Tensor, "n R"]:
        """Scores of samples that can be scored; `self.network` is on `self.device`."""

    @final
    def load(self) -> None:
        """Read the weights, once."""
        if self._loaded:
            return
        self.network = self.read().eval().requires_grad_(False)
        if not self.offload:
            self.network.to(self.device)
        self._loaded = True

    @final
    def score(self, batch: MediaBatch) -> RewardOutput:
        """Rate what can be rated, `batch_size` samples at a time."""
        failed = self.spec.screen(batch)
        self.load()
        if self.offload:
            self.network.to(self.device)
        good = [i for i in range(len(batch)) if i not in failed]
        values = torch.full((len(batch), len(self.spec.dims)), torch.nan)
        with torch.set_grad_enabled(batch.media.requires_grad):
            if good:
                parts = [self.rate(part) for part in batch.take(good).chunks(self.batch_size)]
                values = values.index_put((torch.tensor(good),), torch.cat(parts).float().cpu())
        if self.offload and not values.requires_grad:  # a graph still needs its weights in place
            self.network.to("cpu")
        return RewardOutput.build(self.spec, values, failed)
