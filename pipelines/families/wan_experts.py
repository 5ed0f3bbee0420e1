"""Divides noise levels between the two networks of Wan 2.2 (A14B)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowalign.types import Guidance, UnitInterval
from pipelines.parts.folder import Folder

_NAMES = {"high": "transformer", "low": "transformer_2"}
"""Component names."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Division of the noise levels between the two networks."""

    guidance_2: Guidance | None = None
    """Guidance scale of the low-noise network; None uses the scale of the high-noise network."""
    boundary_ratio: UnitInterval | None = None
    """Share of 1000 timesteps from which the high-noise network is used; None uses the folder's
    value."""
    train: Literal["both", "high", "low"] = "both"
    """Networks to train; the other network stays frozen."""

    @property
    def trained(self) -> tuple[str, ...]:
        """Return the names of the trained components."""
        return tuple(_NAMES.values()) if self.train == "both" else (_NAMES[self.train],)


class TwoNetworks(nn.Module):
    """Network that routes each row to the high-noise or the low-noise network by its timestep.

    A batch may contain rows for both networks; each network sees only its own rows.
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
        """Evaluate each row with the network for its timestep."""
        # One read of the host decides which networks run; `nonzero` would be one for each of them.
        high = (timestep >= self.boundary).tolist()
        rows_of = {side: [i for i, one in enumerate(high) if one == side] for side in (True, False)}
        sides = [(self.high, rows_of[True]), (self.low, rows_of[False])]
        answers = [
            network(
                hidden_states=hidden_states[rows],
                timestep=timestep[rows],
                encoder_hidden_states=encoder_hidden_states[rows],
                **rest,
            )[0]
            for network, rows in sides
            if rows
        ]
        order = torch.tensor(rows_of[True] + rows_of[False]).argsort().tolist()
        return (torch.cat(answers)[order],)


def join_experts(folder: Folder, experts: Experts, components: Mapping[str, Any]) -> TwoNetworks:
    """Join the two networks of a pipeline at the boundary of `experts`, by default the folder's."""
    ratio = experts.boundary_ratio
    if ratio is None:
        ratio = folder.setting("boundary_ratio")
    boundary = ratio * components["scheduler"].config.num_train_timesteps
    return TwoNetworks(**{side: components[n] for side, n in _NAMES.items()}, boundary=boundary)
