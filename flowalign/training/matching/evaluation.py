"""Measure the agreement of the policy with held-out preference pairs."""

import torch

from flowalign.functional.noise_matching import sample_error
from flowalign.training.learner import Learner
from flowalign.training.matching.example_parts import num_examples, prepare
from flowalign.training.matching.matching_settings import MatchingSettings
from flowalign.training.matching.noising import NoiseLevels, noise_for
from flowalign.training.matching.residuals import matching_residuals
from flowalign.training.matching.state_source import ForwardNoise
from flowalign.types import Batch

DRAWS = 4
"""Number of times and noises drawn for each pair."""


@torch.no_grad()
def measure_held_out(
    cfg: MatchingSettings,
    learner: Learner,
    examples: Batch | None,
    seed: int,
) -> dict[str, float]:
    """Return the implicit accuracy and the drift of errors on held-out pairs.

    Times and noises are the same at every call. A pair counts as correct if the policy's error
    relative to the reference is lower for the winner than for the loser, averaged over times. A tie
    counts as half. The result is empty if there are no pairs.
    """
    processes, rows = learner.processes, torch.zeros(0, 3)
    count = num_examples(examples) if examples is not None and "pair" in examples else 0
    first = int(processes.gather(torch.tensor([count]))[: processes.rank].sum())
    if examples is not None and count:
        data = prepare(examples, learner.policy, processes.device)
        draws = [
            _drifts(cfg, learner, noise_for(cfg, learner.policy, data, first, (seed, d, -1)))
            for d in range(DRAWS)
        ]
        rows = torch.stack(draws).mean(0)
    gathered = processes.gather(rows)
    if not len(gathered):
        return {}
    chosen, rejected, accurate = gathered.unbind(1)
    return {
        "eval/pairs/implicit_accuracy": float(_in_order(chosen, rejected).mean()),
        "eval/pairs/accuracy_per_draw": float(accurate.mean()),
        "eval/pairs/drift_chosen": float(chosen.mean()),
        "eval/pairs/drift_rejected": float(rejected.mean()),
    }


def _drifts(cfg: MatchingSettings, learner: Learner, noised: NoiseLevels) -> torch.Tensor:
    """Return [pairs, 3]: winner's drift, loser's drift, and 1 if the winner's drift is lower."""
    found, fields = [], {name: learner.fields[name] for name in ("reference", *cfg.teachers)}
    for part in noised.parts(cfg.micro_batch):
        states = ForwardNoise().build(part, learner.policy, None)
        rows = matching_residuals(cfg, learner.policy, states, fields)
        drift = sample_error(rows["policy"]) - sample_error(rows["reference"])
        chosen, rejected = drift.chunk(2)
        found.append(torch.stack([chosen, rejected, _in_order(chosen, rejected)], 1))
    return torch.cat(found).cpu()


def _in_order(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    return (chosen < rejected).float() + 0.5 * (chosen == rejected).float()
