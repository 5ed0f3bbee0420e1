"""Checks of preference training that run by themselves, and an alarm that goes on watching."""

from collections.abc import Mapping

from flowalign.training.checks import Weights
from flowalign.training.learner import Learner
from flowalign.training.matching.recipe import Preference

_TOLERANCE = 1e-3
_DISPLACED = "displaced_in_a_row"


class Checks:
    """The gates of one run: before its first update, after two, and at every one.

    Raises:
        ValueError: the recipe draws times beyond what the model was trained on.
    """

    def __init__(self, cfg: Preference, learner: Learner):
        cfg.times.check(learner.policy.schedule)
        self.cfg, self.learner = cfg, learner
        self.weights = Weights(learner, cfg.on_failed_check)

    def before_update(self, metrics: Mapping[str, float]) -> None:
        """Before the run's first update: equal networks must give the loss of equal networks."""
        expected = self.cfg.loss.traits.at_start
        if self.learner.num_updates or expected is None or not self.cfg.reference.equals_policy:
            return
        expected *= metrics["weight"]
        found = metrics["policy_loss"]
        self.weights.found["check/loss_at_start"] = found
        self.learner.notes.append(
            f"loss before the first update: {found:.6f}, of equal networks {expected:.6f}"
        )
        if not abs(found - expected) <= _TOLERANCE * max(abs(expected), 1.0):
            self.weights.fail(
                f"before any update the loss is {found:.4f} instead of {expected:.4f}: "
                "policy and reference differ.\n"
                "Look for dropout, another precision, or weights that were loaded into one of them."
            )

    def after_update(self) -> None:
        """After the first two steps with an update: weights moved, ranks agree."""
        self.weights.after_update()

    def watch(self, metrics: Mapping[str, float]) -> None:
        """Say once that winners have been matched worse than by the reference for long."""
        worse, carried = metrics.get("drift_chosen", 0.0) > 0, self.learner.carried
        carried[_DISPLACED] = carried.get(_DISPLACED, 0.0) + 1 if worse else 0.0
        if self.cfg.alarm and carried[_DISPLACED] == self.cfg.alarm:
            self.learner.notes.append(
                f"likelihood displacement: for {self.cfg.alarm} updates the policy has matched "
                "winners worse than the reference does (drift_chosen above 0); "
                "recipe.sft, the Safeguard, or a smaller learning rate hold them"
            )

    def metrics(self) -> dict[str, float]:
        """What the gates measured since the last call."""
        return self.weights.metrics() | {_DISPLACED: self.learner.carried.get(_DISPLACED, 0.0)}
