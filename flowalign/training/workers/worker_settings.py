"""Define the settings of rollout workers: our processes, or SGLang-Diffusion servers."""

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from flowalign.types.ranges import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
    require_ranges,
)


@dataclass(frozen=True, kw_only=True)
class SGLang:
    """SGLang-Diffusion servers that sample the rollouts.

    Weights are sent as safetensors files, merged with the adapter. After each sync, the server
    confirms the SHA-256 of every merged tensor, and one sample with a fixed seed is compared with
    the training process. Before the first step, rewards of equal samples are compared as well.

    Source: `multimodal_gen/runtime/entrypoints/post_training` in commits 078e5e2 and 0730031 of
    sgl-project/sglang. Tested with a mock server only.
    """

    urls: list[str]
    """Address of each server, such as `http://localhost:30000`. Training processes share none."""
    model: str
    """Name of the model that `/v1/models` of each server must report."""
    folder: str | None = None
    """Folder for weights that the servers can read as well. Null: a temporary folder, for servers
    on this machine."""
    module: str = "transformer"
    """Name of the trained network among the modules of the server's pipeline."""
    generator_device: Literal["cuda", "cpu"] = "cuda"
    """Device of the server's random numbers."""
    sampling_params: dict[str, Any] = field(default_factory=dict)
    """Further sampling parameters of each request, such as `{height: 512, width: 512}`."""
    tolerance: PositiveFloat = 0.05
    """Largest distance between the samples of the fixed seed, relative to the sample's norm."""
    max_reward_gap: PositiveFloat = 0.25
    """Largest difference between the mean rewards of both backends, in standard deviations."""

    def __post_init__(self) -> None:
        """Reject invalid settings."""
        require_ranges(self, "rollouts.sglang")
        wrong = [url for url in self.urls if not re.fullmatch(r"https?://[^/\s]+/?", url)]
        if wrong or not self.urls or len({*self.urls}) < len(self.urls):
            raise ValueError(
                f"rollouts.sglang.urls is {self.urls}; it must list different addresses such as "
                "http://localhost:30000"
            )


@dataclass(frozen=True, kw_only=True)
class RolloutWorkers:
    """Settings of the workers that sample rollouts for a training process."""

    workers: PositiveInt = 1
    """Number of workers of each training process."""
    sglang: SGLang | None = None
    """SGLang-Diffusion servers that sample instead of our processes. Null: our processes."""
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
    """Longest time in seconds to wait for an answer. A worker without an answer is restarted, a
    server is asked again."""
    start_timeout: PositiveFloat = 1800.0
    """Longest time in seconds to load the model."""
    restarts: NonNegativeInt = 3
    """Number of restarts of killed or hanging workers per run. After that the run ends."""

    def __post_init__(self) -> None:
        """Reject settings outside their ranges."""
        require_ranges(self, "rollouts")
        if self.sglang and (self.workers != 1 or self.devices):
            raise ValueError(
                "rollouts.workers and devices set up our worker processes, but rollouts.sglang "
                "samples on servers: leave them out, and list the servers in rollouts.sglang.urls"
            )
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
        """Return whether older weights or other kernels sample rollouts."""
        return self.max_staleness > 0 or self.sglang is not None

    @property
    def rows(self) -> dict[str, str]:
        """Return the row of the plan table about the workers."""
        age = "by the current weights"
        if self.max_staleness:
            age = "during the update of the previous step, by weights one step old"
        who = f"{self.workers} per process, each with a copy of the model; they sample"
        if self.sglang:
            who = f"{len(self.sglang.urls)} SGLang-Diffusion servers; they sample"
        return {"rollout workers": f"{who} {age}"}

    def check_prompts(self, prompts_per_step: int, world: int) -> None:
        """Raise ValueError if a worker would have no prompt, or a process no server."""
        workers, key = self.workers, "rollouts.workers"
        if self.sglang:
            servers, key = len(self.sglang.urls), "the number of rollouts.sglang.urls"
            if servers % world:
                raise ValueError(
                    f"rollouts.sglang.urls lists {servers} servers for {world} processes, which "
                    "share none: list an equal number of servers for each process"
                )
            workers = servers // world
        if prompts_per_step // world < workers:
            raise ValueError(
                f"{key} is {workers}, but each training process samples "
                f"{prompts_per_step // world} prompts per step: set at most that many workers"
            )
