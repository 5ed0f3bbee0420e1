"""ReFL: the reward of the clean latents that one late step predicts."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flowalign.connections.steps import draw_int, require_steps
from flowalign.functional.connection import predicted_clean
from flowalign.types import Connected, Connection, PositiveInt, Replay


@dataclass(frozen=True, kw_only=True)
class ReFL(Connection):
    """Scores x_k - sigma_k v(x_k) for one step k among the last ones.

    Source: ImageReward, arXiv:2304.05977, which draws among the last 10 of 40 steps; the default
    is that of FlowBP's comparison, arXiv:2606.11075, with 25 steps.
    """

    last_steps: PositiveInt = 11
    """Number of last steps among which one is drawn uniformly."""

    def __call__(self, replay: Replay, generator: torch.Generator) -> Iterator[Connected]:
        """Yield the prediction of one step."""
        require_steps(f"ReFL.last_steps {self.last_steps}", self.last_steps, replay.num_steps)
        k = replay.num_steps - draw_int(1, self.last_steps, generator)
        yield Connected(predicted_clean(replay.state(k), replay.velocity(k), replay.sigmas[k]))
