"""Form spans of a rollout: consecutive steps that are clipped, and differentiated, as one."""

from dataclasses import replace

import torch

from flowalign.distributed.processes import Processes
from flowalign.functional.span import find_spans
from flowalign.training.policy_gradient.batches import TrainBatch


def join_spans(batch: TrainBatch, longest: int, processes: Processes) -> TrainBatch:
    """Join consecutive trained steps in spans, each trained as the transition that it begins with.

    A span has the mean of its steps' advantages and weights. Where one of its steps is not trained,
    none is.
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
