"""Form spans of a rollout: consecutive steps with one clipped ratio and one gradient."""

from dataclasses import replace

import torch

from flowalign.distributed.processes import Processes
from flowalign.functional.surrogate import find_spans
from flowalign.training.policy_gradient.batches import RolloutBatch


def join_spans(batch: RolloutBatch, longest: int, processes: Processes) -> RolloutBatch:
    """Return a batch of spans of consecutive trained steps, each stored at its first step.

    A span has the mean of its steps' advantages and weights. If one of its steps is masked, the
    whole span is.
    """
    trained = batch.trajectory.trained.any(0).nonzero().flatten().tolist()
    span = torch.full((batch.trajectory.num_steps,), -1)
    mask, advantage = torch.zeros_like(batch.mask), torch.zeros_like(batch.advantage)
    weight = torch.zeros_like(batch.weight)
    for steps in find_spans(trained, longest):
        first = steps[0]
        span[steps] = first
        mask[:, first] = batch.mask[:, steps].all(1)
        advantage[:, first] = batch.advantage[:, steps].mean(1)
        weight[first] = batch.weight[steps].mean()
    joined = batch.with_samples(mask=mask, advantage=advantage).with_steps(span=span, weight=weight)
    return replace(joined, global_mask=processes.gather(mask))
