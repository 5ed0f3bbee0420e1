"""Form spans of a rollout: consecutive steps with one clipped ratio and one gradient."""

from dataclasses import replace

import torch

from flowalign.distributed.processes import Processes
from flowalign.functional.span import find_spans
from flowalign.training.policy_gradient.batches import TrainBatch


def join_spans(batch: TrainBatch, longest: int, processes: Processes) -> TrainBatch:
    """Return a batch of spans of consecutive trained steps, each stored at its first step.

    A span has the mean of its steps' advantages and weights. If one of its steps is masked, the
    whole span is.
    """
    trained = batch.trajectory.trained.any(0).nonzero().flatten().tolist()
    spans = {steps[0]: steps for steps in find_spans(trained, longest)}
    mask, advantage = torch.zeros_like(batch.mask), torch.zeros_like(batch.advantage)
    weight = torch.zeros_like(batch.weight)
    for first, steps in spans.items():
        mask[:, first] = batch.mask[:, steps].all(1)
        advantage[:, first] = batch.advantage[:, steps].mean(1)
        weight[first] = batch.weight[steps].mean()
    return replace(
        batch,
        spans=spans,
        mask=mask,
        advantage=advantage,
        weight=weight,
        global_mask=processes.gather(mask),
    )
