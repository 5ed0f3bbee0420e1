"""Check the weights automatically after the first updates, in all recipes."""

import re
from collections.abc import Callable, Iterable
from typing import Literal

import torch

from flowalign.training.learner import Learner, TrainingFailure
from flowalign.utils.stages import stage

OnFailure = Literal["raise", "warn"]
"""Action after a failed check. raise: the run ends. warn: the message is logged."""


class WeightChecks:
    """Checks of the weights after the first two steps with an update."""

    def __init__(self, learner: Learner, on_failure: OnFailure, log: Callable[[str], None]):
        self.learner, self.on_failure, self.log = learner, on_failure, log
        self.start = {name: p.cpu() for name, p in learner.snapshot()}
        self.seen = 0
        self.made = learner.num_updates - learner.num_skipped
        self.found: dict[str, float] = {}

    @stage("check")
    def after_update(self) -> bool:
        """Check that weights changed and ranks agree, after the first two steps with an update.

        Return True if this step was checked.
        """
        made = self.learner.num_updates - self.learner.num_skipped
        if self.seen == 2 or made == self.made:
            return False
        self.seen, self.made = self.seen + 1, made
        self._moved()
        difference = self.learner.processes.max_rank_difference(self.learner.parameters)
        self.found["check/max_rank_difference"] = difference
        if difference != 0:
            self.fail(
                "after an update the ranks hold different weights "
                f"(sums differ by {difference:.1e})."
            )
        if self.seen == 2:
            self.start.clear()
        return True

    def metrics(self) -> dict[str, float]:
        """Return the measurements since the last call."""
        found, self.found = self.found, {}
        return found

    def fail(self, message: str) -> None:
        """Stop the run, or log the message."""
        if self.on_failure == "raise":
            raise TrainingFailure(f"{message}\n(Set on_failed_check: warn to continue anyway.)")
        self.log(message)

    def _moved(self) -> None:
        now = {name: p.cpu() for name, p in self.learner.snapshot()}
        moved = {n: 1.0 for n, before in self.start.items() if not torch.equal(before, now[n])}
        moved = self.learner.processes.sum_by_name(moved)  # sharded parameters may move elsewhere
        still = [name for name in now if name not in moved]
        self.found["check/moved_share"] = 1 - len(still) / len(now)
        if len(still) == len(now):
            self.fail(
                f"no trained parameter changed in update {self.learner.num_updates}: "
                "all advantages (see zero_std_ratio) or weights were 0, "
                "or the loss does not reach the parameters."
            )
        elif self.seen == 2 and (dead := _kind_names(still) - _kind_names(set(now) - set(still))):
            self.fail(
                f"parameters of this kind never change, in any layer: {', '.join(sorted(dead))}."
            )


def _kind_names(names: Iterable[str]) -> set[str]:
    """Return parameter names without layer numbers.

    A single layer may be unused, but not all layers of one kind.
    """
    return {re.sub(r"\.\d+\.", ".*.", name) for name in names}
