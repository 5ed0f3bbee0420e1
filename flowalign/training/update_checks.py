"""Check the first updates of all recipes automatically, and the auxiliary terms of losses."""

import re
from collections.abc import Callable, Iterable, Mapping
from math import sqrt
from typing import Literal

from flowalign.losses.gradient_squares import POLICY, PREFIX
from flowalign.training.learner import Learner, TrainingFailure
from flowalign.utils.costs import stage

OnFailure = Literal["raise", "warn"]
"""Action after a failed check. raise: the run ends. warn: the message is logged."""
MOST_STEPS = 10
"""Number of steps with a gradient after which every kind of parameter must have had one.

One step is not enough: the gradient of a LoRA's A is 0 until B has moved, and during a long warmup
the first values of B are 0 in half precision.
"""


class WeightChecks:
    """Checks of gradients and weights after the first steps with a gradient."""

    def __init__(
        self,
        learner: Learner,
        on_failure: OnFailure,
        log: Callable[[str], None],
        further: Callable[[], None] = lambda: None,
    ):
        self.learner, self.on_failure, self.log = learner, on_failure, log
        self.further = further
        """Further check of the steps that count."""
        self.seen = 0
        self.warned = self.complete = False
        self.made, self.effective = self._counts()
        self.found: dict[str, float] = {}

    def begin(self) -> None:
        """Count updates from the current state of the learner, after a checkpoint was restored."""
        self.made, self.effective = self._counts()

    @stage("check")
    def after_update(self, metrics: Mapping[str, float]) -> None:
        """Check that gradients reach all kinds of parameters and ranks agree, in the first steps.

        A step counts if it made an update with a gradient.
        """
        made, effective = self.made, self.effective
        self.made, self.effective = self._counts()
        if self.seen == MOST_STEPS or self.made == made:
            return
        if self.effective == effective:
            if not effective:
                self._report_no_gradient(metrics)
            return
        self.seen += 1
        if self.seen == 1:
            self._compare_with_eps(metrics)
        if not self.complete:
            self._check_kinds()
        if self.seen <= 2:
            self._compare_ranks()
        self.further()

    def metrics(self) -> dict[str, float]:
        """Return the measurements since the last call."""
        found, self.found = self.found, {}
        return found

    def fail(self, message: str) -> None:
        """Stop the run, or log the message."""
        if self.on_failure == "raise":
            raise TrainingFailure(f"{message}\n(Set on_failed_check: warn to continue anyway.)")
        self.log(message)

    def _counts(self) -> tuple[int, int]:
        made = self.learner.num_updates - self.learner.num_skipped
        return made, self.learner.num_with_gradient

    def _report_no_gradient(self, metrics: Mapping[str, float]) -> None:
        update = f"update {self.learner.num_updates} had no gradient"
        if metrics.get("zero_std_ratio") != 1:
            self.seen += 1
            self.fail(
                f"{update}: all weights were 0, or the loss does not reach the trained parameters."
            )
        elif not self.warned:
            self.warned = True
            self.log(
                f"warning: {update}, because the samples of each prompt have equal rewards "
                "(zero_std_ratio is 1)"
            )

    def _compare_with_eps(self, metrics: Mapping[str, float]) -> None:
        """Warn if Adam's eps, and not the gradient, sets the size of the first update.

        Weights without a gradient are left out, as at first the matrices A of a LoRA.
        """
        learner = self.learner
        count = sum(learner.named[name].numel() for name in learner.reached)
        norm = min(metrics.get("optim/grad_norm", 0.0), learner.cfg.max_grad_norm)
        rms, eps = norm / sqrt(max(count, 1)), learner.cfg.eps
        self.found["check/gradient_rms"] = rms
        if 0 < rms < eps:
            self.log(
                f"warning: the first gradient has a root mean square of {rms:.1e}, below "
                f"optimizer.eps {eps:g}, so weights move by less than {rms / eps:.0%} of the "
                f"learning rate: set optimizer.eps to {rms / 1e3:.0e}"
            )

    def _check_kinds(self) -> None:
        processes, names = self.learner.processes, self.learner.named.keys()
        mine = dict.fromkeys(self.learner.reached, 1.0)
        reached = processes.sum_by_name(mine).keys()  # sharded gradients may be elsewhere
        self.found["check/gradient_share"] = len(reached) / len(names)
        dead = _kind_names(names - reached) - _kind_names(reached)
        self.complete = self.seen > 1 and not dead
        if dead and self.seen == MOST_STEPS:
            self.fail(
                f"parameters of this kind had no gradient in {MOST_STEPS} steps, in any layer: "
                f"{', '.join(sorted(dead))}."
            )

    def _compare_ranks(self) -> None:
        difference = self.learner.processes.max_rank_difference(self.learner.parameters)
        self.found["check/max_rank_difference"] = difference
        if difference != 0:
            self.fail(
                "after an update the ranks hold different weights "
                f"(sums differ by {difference:.1e})."
            )


def _kind_names(names: Iterable[str]) -> set[str]:
    """Return parameter names without layer numbers.

    A single layer may be unused, but not all layers of one kind.
    """
    return {re.sub(r"\.\d+\.", ".*.", name) for name in names}


LARGEST_RATIO = 3.0
"""Gradient norm of an auxiliary term, relative to the policy term, above which a run warns."""


class AuxiliaryTerms:
    """Gradient-norm ratios of the auxiliary terms of a loss, with one warning per term."""

    def __init__(self, log: Callable[[str], None]):
        self.log = log
        self.warned: set[str] = set()

    def compare(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics with ratios of gradient norms instead of squared norms.

        Norms are taken at the output of the network, as root mean squares over samples. A ratio
        above `LARGEST_RATIO` is logged once for each term. Without a gradient of the policy term
        there is no ratio.
        """
        squares = {n.removeprefix(PREFIX): x for n, x in metrics.items() if n.startswith(PREFIX)}
        policy = squares.pop(POLICY, 0.0)
        ratios = {name: sqrt(square / policy) for name, square in squares.items() if policy > 0}
        for name in sorted(ratios.keys() - self.warned):
            if ratios[name] > LARGEST_RATIO:
                self.warned.add(name)
                self.log(
                    f"warning: the gradient of the auxiliary term {name} is {ratios[name]:.3g} "
                    f"times that of the policy term (limit {LARGEST_RATIO:g}): lower its "
                    "coefficient, or the reward is hardly optimized"
                )
        rest = {name: value for name, value in metrics.items() if not name.startswith(PREFIX)}
        return rest | {f"gradient_ratio/{name}": ratio for name, ratio in ratios.items()}
