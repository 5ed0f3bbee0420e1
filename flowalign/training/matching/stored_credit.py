"""Weight the denoising steps of stored pairs by credit, from stored values of their states."""

from collections.abc import Sequence
from typing import NoReturn

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.data.preference.preference_data import Pair
from flowalign.functional.transition import FlowSDE
from flowalign.training.matching.rollouts import weigh_gaps
from flowalign.training.matching.source import StepAdvantages
from flowalign.training.recipe import Log
from flowalign.types import (
    CreditEstimator,
    LatentReward,
    PastOutcomes,
    Policy,
    SharedRows,
    Trajectory,
    ValueFunction,
    plain_requests,
)
from flowalign.types.trajectory import Completion
from flowalign.utils.errors import explain_errors

_DRY_STEPS = 100
"""Number of denoising steps in the trial of a credit method before data are read."""


class StoredValues(ValueFunction):
    """Values of the states of stored samples; nothing else of the states is known."""

    def __init__(self, method: CreditEstimator, values: Float[Tensor, "B S"]):
        self.method, self.values = type(method).__name__, values

    @override
    def __call__(self, ks: Sequence[int], how: Completion | None = None) -> Tensor:
        last = self.values.shape[1] - 1
        for k in ks:
            if not 0 <= k <= last:
                raise ValueError(
                    f"recipe.data.credit {self.method} asks for the value of state {k}; the stored "
                    f"values are of states 0 to {last}"
                )
        return self.values[:, list(ks), None]

    @override
    def past(self, num_steps: int) -> PastOutcomes | None:
        return None

    @override
    def predicted(self, ks: Sequence[int]) -> NoReturn:
        self._refuse("predictions of a critic")

    @override
    def scored(self, ks: Sequence[int], reward: LatentReward) -> NoReturn:
        self._refuse("latent rewards")

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(
            f"recipe.data.credit is {self.method}, which needs {what}. Stored pairs have only the "
            "values of their states: choose a method such as flowalign.credit.Gain"
        )


def lead_of_chosen(
    method: CreditEstimator,
    chosen: Float[Tensor, "m S"],
    rejected: Float[Tensor, "m S"],
    sigmas: Float[Tensor, "S"],
) -> Float[Tensor, "m T"]:
    """Return the lead of the chosen item's credit at each step, 0 where it has none.

    `chosen` and `rejected` hold the value of each state, the last one of the finished item. The
    trajectory of the credit method is a chain that is stochastic at all steps, without states; the
    items of a pair are a group of two.

    Raises:
        ValueError: The method needs more than the values.
    """
    values = torch.stack([chosen, rejected], 1).flatten(0, 1)
    count, num_steps = len(values), values.shape[1] - 1
    trajectory = Trajectory(
        logp=torch.zeros(count, num_steps),
        states={},
        sigmas=sigmas,
        eta=torch.ones(count, num_steps),
        kernel=FlowSDE(),
        cond={},
        requests=plain_requests([""] * count),
        group_size=2,
        rows=SharedRows(torch.arange(count)[:, None].expand(-1, num_steps + 1)),
    )
    credit = method(trajectory, StoredValues(method, values))
    earned = credit.value[..., 0].where(credit.mask, 0.0).unflatten(0, (-1, 2))
    return (earned[:, 0] - earned[:, 1]).clamp(min=0)


def check_method(method: CreditEstimator) -> None:
    """Raise ValueError if the credit method needs more than values of states."""
    zeros = torch.zeros(2, _DRY_STEPS + 1)
    with explain_errors("recipe.data.credit does not fit stored pairs"):
        lead_of_chosen(method, zeros, zeros, torch.linspace(1, 0, _DRY_STEPS + 1))


def stored_values(pairs: Sequence[Pair]) -> tuple[Float[Tensor, "m S"], Float[Tensor, "m S"]]:
    """Return the stored values of the states of the chosen and of the rejected items.

    Raises:
        ValueError: A pair has no values, or other numbers of states than the first pair.
    """
    size = len(pairs[0].values_chosen)
    for pair in pairs:
        found = [len(pair.values_chosen), len(pair.values_rejected)]
        if found != [size, size] or size < 2:
            raise ValueError(
                f"{pair.where}: recipe.data.credit needs the columns values_chosen and\n"
                "values_rejected in every pair, lists with the values of states 0 to T. There are "
                f"{found[0]} and {found[1]} values,\nand {size} in the first pair: set credit to "
                "null, or take Rollouts, which values states itself"
            )
    chosen = torch.tensor([pair.values_chosen for pair in pairs])
    return chosen.float(), torch.tensor([pair.values_rejected for pair in pairs]).float()


def weigh_stored_steps(
    method: CreditEstimator, pairs: Sequence[Pair], policy: Policy, log: Log
) -> StepAdvantages:
    """Return the weight of each pair at each step: its lead divided by the mean lead.

    Raises:
        ValueError: A pair has no values, or credit leads in no pair.
    """
    chosen, rejected = stored_values(pairs)
    sigmas = policy.schedule(chosen.shape[1] - 1).cpu()
    lead = lead_of_chosen(method, chosen, rejected, sigmas)
    trained = lead > 0
    if not trained.any():
        raise ValueError(
            f"recipe.data.credit {type(method).__name__} gives the chosen item of no pair a "
            "lead at any step: set credit to null"
        )
    if unused := int((~trained.any(1)).sum()):
        log(f"{unused} of {len(lead)} pairs are not trained: credit leads at no step")
    weight = weigh_gaps(lead, float(lead[trained].mean()), "gap")
    return StepAdvantages(sigmas, None, trained, weight=weight)
