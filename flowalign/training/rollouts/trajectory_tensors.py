"""Convert sampled trajectories to named tensors, and back, to send them between processes.

A trajectory's remaining fields follow from the settings, the requests and the step.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flowalign.sampling.complete_states import CompletionRequest
from flowalign.sampling.rollout import empty_trajectory
from flowalign.training.rollouts.rollout_settings import RolloutSettings
from flowalign.types import Request, Trajectory

_FIELDS = ("states", "means", "hidden")
"""Fields that map indices of states or steps to tensors."""


def to_tensors(cfg: RolloutSettings, steps: Sequence[int], drawn: Trajectory) -> dict[str, Tensor]:
    """Return the tensors of trajectories by name; `steps` are the trained steps."""
    named = {"logp": drawn.logp, "sigmas": drawn.sigmas, "eta": drawn.eta}
    named |= {f"cond.{name}": value for name, value in drawn.cond.items()}
    for field in _FIELDS:
        named |= {f"{field}.{k}": value for k, value in getattr(drawn, field).items()}
    followed = list_completions(cfg, steps)
    return named | {f"finished.{followed.index(key)}": x for key, x in drawn.finished.items()}


def from_tensors(
    cfg: RolloutSettings,
    steps: Sequence[int],
    requests: Sequence[Request],
    named: Mapping[str, Tensor],
    device: torch.device,
) -> Trajectory:
    """Return the trajectories of the requests; kept states are placed like those of a rollout."""
    followed, storage = list_completions(cfg, steps), cfg.sampling.states
    moved = {name: value.to(device) for name, value in named.items() if _is_used_by_policy(name)}
    stored = {
        name: value if storage.device == "cpu" else value.to(device)
        for name, value in named.items()
        if name not in moved
    }
    return replace(
        empty_trajectory(cfg.sampling, steps, requests, moved["sigmas"]),
        logp=moved["logp"],
        eta=moved["eta"],
        cond=dict(_select("cond", moved)),
        states={int(k): x for k, x in _select("states", stored)},
        means={int(k): x for k, x in _select("means", stored)},
        hidden={int(k): x for k, x in _select("hidden", moved)},
        finished={followed[int(i)]: x for i, x in _select("finished", stored)},
    )


def list_completions(cfg: RolloutSettings, steps: Sequence[int]) -> list[CompletionRequest]:
    """Return the states that are completed within a rollout."""
    return [request for request in cfg.requested(steps) if request[1].follows_rollout]


def _is_used_by_policy(name: str) -> bool:
    return name.partition(".")[0] in ("logp", "sigmas", "eta", "cond", "hidden")


def _select(field: str, named: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
    """Return the keys and tensors of one field."""
    parts = ((name.partition("."), value) for name, value in named.items())
    return ((key, value) for (first, _, key), value in parts if first == field)
