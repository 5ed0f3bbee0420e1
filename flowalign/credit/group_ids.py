"""Compute group ids: transitions with equal ids are compared with each other."""

import torch
from jaxtyping import Int
from torch import Tensor

from flowalign.types import Trajectory


def prompt_step_ids(trajectory: Trajectory) -> Int[Tensor, "B T"]:
    """Return the id prompt * T + k: samples of a prompt are compared at equal steps only."""
    num_samples, num_steps = trajectory.logp.shape
    prompt = torch.arange(num_samples) // trajectory.group_size
    return prompt[:, None] * num_steps + torch.arange(num_steps)


def sibling_ids(trajectory: Trajectory) -> Int[Tensor, "B T"]:
    """Return ids that are equal for transitions from the same state."""
    steps = torch.arange(trajectory.num_steps)
    return trajectory.rows.source_row[:, :-1] * trajectory.num_steps + steps
