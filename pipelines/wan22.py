"""Wraps Wan 2.2 with two networks (A14B), for high and for low noise, as a flowalign policy."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowalign.types import Guidance, ModelPlan, PositiveInt, UnitInterval
from pipelines.base import Precision
from pipelines.folder import setting_of
from pipelines.video import Memory, Video
from pipelines.wan import LORA, VIDEO, Wan
from pipelines.weights import Lora

_PARTS = {"high": "transformer", "low": "transformer_2"}


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Divides the noise levels between the two networks."""

    guidance_2: Guidance | None = None
    """Guidance scale of the low-noise network; None: that of the high-noise network."""
    boundary_ratio: UnitInterval | None = None
    """Timesteps of at least 1000 times this go to the high-noise network; None: the folder's
    value."""
    train: Literal["both", "high", "low"] = "both"
    """Which networks are trained; the others stay frozen."""


class TwoNetworks(nn.Module):
    """Routes each row of a batch to the high-noise or the low-noise network by its timestep.

    A batch may contain rows of both sides; each network sees only its own.
    """

    def __init__(self, high: Any, low: Any, boundary: float):
        super().__init__()
        self.high, self.low, self.boundary = high, low, boundary

    @property
    def device(self) -> torch.device:
        """Return the device of both networks."""
        return self.high.device

    def forward(
        self, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, **rest: Any
    ) -> tuple[Tensor, ...]:
        """Evaluate each row with the network in charge of its timestep."""
        high = timestep >= self.boundary
        sides = [(self.high, high.nonzero().flatten()), (self.low, (~high).nonzero().flatten())]
        answers = [
            network(
                hidden_states=hidden_states[rows],
                timestep=timestep[rows],
                encoder_hidden_states=encoder_hidden_states[rows],
                **rest,
            )[0]
            for network, rows in sides
            if len(rows)
        ]
        order = torch.cat([rows for _, rows in sides]).argsort()
        return (torch.cat(answers)[order],)


class Wan22(Wan):
    """Wraps a `WanPipeline` folder with two networks (Wan 2.2 A14B) as a text-to-video policy.

    Everything else is the same as for `Wan`, which also takes the 5B model of Wan 2.2, because that
    has one network. `guidance` is that of high noise; at 1 or less neither network is guided, like
    in the pipeline.

    The adapter of the first network is saved as usual, that of the second in the folder
    `transformer_2`: pipe.load_lora_weights(folder + "/transformer_2", load_into_transformer_2=True)
    """

    num_networks = 2

    def __init__(
        self,
        path: str,
        video: Video = VIDEO,
        guidance: Guidance = 4.0,
        experts: Experts = Experts(guidance_2=3.0),
        lora: Lora | None = LORA,
        precision: Precision = "bf16",
        max_sequence_length: PositiveInt = 512,
        memory: Memory = Memory(),  # noqa: B008 (frozen)
    ):
        super().__init__(path, video, guidance, lora, precision, max_sequence_length, memory)
        self.experts = experts
        self.parts = tuple(_PARTS.values())
        if experts.train != "both":
            self.parts = (_PARTS[experts.train],)

    def plan(self) -> ModelPlan:
        one = super().plan()
        trainable = len(self.parts) * one.trainable
        return replace(one, parameters=2 * one.parameters, trainable=trainable, networks=2)

    def assembled(self, components: Mapping[str, Any]) -> TwoNetworks:
        ratio = self.experts.boundary_ratio
        if ratio is None:
            ratio = setting_of(self.pipeline_class, self.path, "boundary_ratio")
        self.boundary = ratio * self.pipe.scheduler.config.num_train_timesteps
        networks = {side: components[part] for side, part in _PARTS.items()}
        return TwoNetworks(**networks, boundary=self.boundary)

    def guidance_at(self, time: Tensor) -> Tensor:
        low = self.guidance if self.experts.guidance_2 is None else self.experts.guidance_2
        high = (time >= self.boundary)[:, None, None, None, None]
        return torch.where(high, self.guidance, low)
