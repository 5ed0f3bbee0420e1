"""Define the settings of rollout workers."""

import re
from dataclasses import dataclass
from typing import Literal

from flowalign.types.ranges import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
    require_ranges,
)


@dataclass(frozen=True, kw_only=True)
class RolloutWorkers:
    """Settings of the workers that sample rollouts for a training process."""

    workers: PositiveInt = 1
    """Number of workers of each training process."""
    max_staleness: Literal[0, 1] = 0
    """Largest age of the weights that sample a rollout, in training steps. 0: the same rollouts as
    without workers. 1: workers sample the next step during the update of this one."""
    max_clipped: UnitInterval = 0.5
    """Largest share of transitions with a ratio between the current and the sampling weights
    outside the clip range of the loss. A larger share ends a run with a ratio loss."""
    devices: list[str] | None = None
    """Device of each worker: `cpu`, or `cuda:N` in the numbering of the training process. Null:
    the device of the training process."""
    timeout: PositiveFloat = 600.0
    """Longest time in seconds to wait for an answer. A worker without an answer is restarted."""
    start_timeout: PositiveFloat = 1800.0
    """Longest time in seconds to load the model."""
    restarts: NonNegativeInt = 3
    """Number of restarts of killed or hanging workers per run. After that the run ends."""

    def __post_init__(self) -> None:
        """Reject settings outside their ranges."""
        require_ranges(self, "rollouts")
        if self.devices is None:
            return
        valid = all(re.fullmatch(r"cpu|cuda:\d+", device) for device in self.devices)
        if not valid or len(self.devices) != self.workers:
            raise ValueError(
                f"rollouts.devices is {self.devices}; it must name `cpu` or `cuda:N` for each of "
                f"the {self.workers} workers, or be null"
            )

    @property
    def is_off_policy(self) -> bool:
        """Return whether older weights sample rollouts."""
        return self.max_staleness > 0

    @property
    def rows(self) -> dict[str, str]:
        """Return the row of the plan table about the workers."""
        age = "by the current weights"
        if self.max_staleness:
            age = "during the update of the previous step, by weights one step old"
        who = f"{self.workers} per process, each with a copy of the model; they sample"
        return {"rollout workers": f"{who} {age}"}

    def check_prompts(self, prompts_per_step: int, world: int) -> None:
        """Raise ValueError if a worker would have no prompt."""
        if prompts_per_step // world < self.workers:
            raise ValueError(
                f"rollouts.workers is {self.workers}, but each training process samples "
                f"{prompts_per_step // world} prompts per step: set at most that many workers"
            )
