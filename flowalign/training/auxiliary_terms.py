"""Compare the gradients of the auxiliary terms of a loss with that of its policy term."""

from collections.abc import Callable, Mapping
from math import sqrt

from flowalign.losses.gradient_squares import POLICY, PREFIX

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
