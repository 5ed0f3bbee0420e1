"""TODO module docstring."""

import re
from collections.abc import Iterable
from typing import Literal

import torch

from flowalign.training.learner import Learner, TrainingFailure

OnFailure = Literal["raise", "warn"]


class Weights:
    """What every kind of training is checked for after the first two steps with an update."""

    def __init__(self, learner: Learner, on_failure: OnFailure):
        self.learner, self.on_failure = learner, on_failure
        self.start = {name: p.cpu() for name, p in learner.snapshot()}
        self.seen = 0
        self.made = learner.num_updates - learner.num_skipped
        self.found: dict[str, float] = {}

    def after_update(self) -> bool:
        """Weights moved, ranks agree; whether this was one of the two steps."""
        made = self.learner.num_updates - self.learner.num_skipped
        if self.seen == 2 or made == self.made:
            return False
        self.seen, self.made = self.seen + 1, made
        self._moved()
        spread = self.learner.processes.spread(self.learner.parameters)
        self.found["check/rank_spread"] = spread
        if spread != 0:
            self.fail(
                f"after an update the ranks hold different weights (sums differ by {spread:.1e})."
            )
        if self.seen == 2:
            self.start.clear()
        return True

    def metrics(self) -> dict[str, float]:
        """What was measured since the last call."""
        found, self.found = self.found, {}
        return found

    def fail(self, message: str) -> None:
        """Stop the run, or note it."""
        if self.on_failure == "raise":
            raise TrainingFailure(f"{message}\n(on_failed_check: warn goes on regardless)")
        self.learner.notes.append(message)

    def _moved(self) -> None:
        now = {name: p.detach().cpu() for name, p in self.learner.named.items()}
        still = [name for name, before in self.start.items() if torch.equal(before, now[name])]
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
    """Parameter names without layer numbers: a layer may rightly be idle, a whole kind may not."""
    return {re.sub(r"\.\d+\.", ".*.", name) for name in names}
