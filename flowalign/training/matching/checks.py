"""Check matching training automatically, and measure agreement with held-out pairs."""

from collections.abc import Mapping

import torch

from flowalign.functional.noise_matching import sample_error
from flowalign.training.engine import AuxiliaryTerms, WeightChecks
from flowalign.training.learner import Learner
from flowalign.training.matching.matching_settings import MatchingSettings
from flowalign.training.matching.noising import NoiseLevels, noise_for, num_examples, prepare
from flowalign.training.matching.residuals import matching_residuals
from flowalign.training.matching.state_source import ForwardNoise
from flowalign.training.recipe import Log
from flowalign.types import Batch

_TOLERANCE = 1e-3
_LARGEST_DRIFT = 1e-4
"""Tolerance of the mean squared difference between velocities of equal weights.

It is far above rounding errors in half precision and far below the effect of dropout. Velocities
have a mean square of about 1.
"""
_DISPLACED = "displaced_in_a_row"


class MatchingChecks:
    """Automatic checks of a run: before its first update, after its first ones, and at every one.

    Raises:
        ValueError: The recipe draws times outside the range that the model was trained on.
    """

    def __init__(
        self, cfg: MatchingSettings, learner: Learner, loss_state: dict[str, float], log: Log
    ):
        cfg.times.check(learner.policy.schedule)
        self.cfg, self.learner, self.loss_state, self.log = cfg, learner, loss_state, log
        self.weights = WeightChecks(learner, cfg.on_failed_check, log)
        self.terms = AuxiliaryTerms(log)

    def before_update(self, metrics: Mapping[str, float]) -> None:
        """Check before the first update that networks with equal weights give equal outputs."""
        if self.learner.num_updates:
            return
        if metrics.get("old_drift", 0.0) > _LARGEST_DRIFT:
            self.weights.fail(
                f"before any update the old policy's velocities differ from the policy's by "
                f"{metrics['old_drift']:.2g}, a mean square, though it has the same weights.\n"
                "Look for dropout, or for layers that change when they are evaluated."
            )
        expected = self.cfg.loss.at_start
        equal = self.cfg.reference.equals_policy and self.cfg.cold_start == "policy"
        if expected is None or not equal:
            return
        expected *= metrics["weight"]
        found = metrics["policy_loss"]
        self.weights.found["check/loss_at_start"] = found
        self.log(f"loss before the first update: {found:.6f}, of equal networks {expected:.6f}")
        if not abs(found - expected) <= _TOLERANCE * max(abs(expected), 1.0):
            self.weights.fail(
                f"before any update the loss is {found:.4f} instead of {expected:.4f}: "
                "policy and reference differ.\n"
                "Look for dropout, another precision, or weights that were loaded into one of them."
            )

    def watch(self, metrics: Mapping[str, float]) -> None:
        """Log likelihood displacement once.

        This happens after `displacement_patience` consecutive updates in which the policy matched
        winners worse than the reference does.
        """
        worse = metrics.get("drift_chosen", 0.0) > 0
        in_a_row = self.loss_state.get(_DISPLACED, 0.0) + 1 if worse else 0.0
        self.loss_state[_DISPLACED] = in_a_row
        if self.cfg.displacement_patience and in_a_row == self.cfg.displacement_patience:
            self.log(
                f"likelihood displacement: for {self.cfg.displacement_patience} updates the policy "
                "has matched winners worse than the reference does (drift_chosen above 0); set "
                "recipe.sft, use the loss Safeguard, or lower the learning rate"
            )

    def metrics(self) -> dict[str, float]:
        """Return the number of updates in a row with likelihood displacement."""
        return {_DISPLACED: self.loss_state.get(_DISPLACED, 0.0)}


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
    for rows in noised.rows().split(cfg.micro_batch):
        states = ForwardNoise().build(noised.take(rows["row"]), learner.policy, None)
        states = matching_residuals(cfg, learner.policy, states, fields)
        drift = sample_error(states["policy"]) - sample_error(states["reference"])
        chosen, rejected = drift.chunk(2)
        found.append(torch.stack([chosen, rejected, _in_order(chosen, rejected)], 1))
    return torch.cat(found).cpu()


def _in_order(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    return (chosen < rejected).float() + 0.5 * (chosen == rejected).float()
