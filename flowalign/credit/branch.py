"""Credit a transition with the outcomes of its descendants, or compared with its siblings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import override

from flowalign.functional.advantage import compare_in_groups, group_mean
from flowalign.types import CreditEstimator, LatentReward, StepCredit, Trajectory, ValueFunction
from flowalign.types.trajectory import prompt_step_ids, sibling_ids
from flowalign.utils.ranges import NonNegativeInt, PositiveFloat, PositiveInt, UnitInterval


def fuse_branches(
    outcome: Float[Tensor, "B R"],
    source_row: Int[Tensor, "B S"],
    logp: Float[Tensor, "B T"],
    beta: float | None = None,
) -> Float[Tensor, "B T R"]:
    """Return the value of the state that each transition reaches, from the outcomes below it.

    If beta is None, the value is the mean of all outcomes below the state. Otherwise values are
    computed from the leaves to the root. The value of a state is then the mean over its children,
    weighted by softmax(beta * log-probability of the transition to the child).
    """
    reached = [outcome]
    for k in range(logp.shape[1] - 1, 0, -1):
        state = source_row[:, k].unique(return_inverse=True)[1]
        if beta is None:
            reached.append(group_mean(outcome, state))
            continue
        own = source_row[:, k + 1] == torch.arange(len(source_row))
        weight = torch.where(own, beta * logp[:, k].double(), -torch.inf)
        # Subtract the maximum first, so that the softmax of log-probabilities cannot overflow.
        highest = torch.full_like(weight, -torch.inf)
        highest = highest.scatter_reduce(0, state, weight, "amax")[state]
        weight = (weight - highest).exp()[:, None]
        total = torch.zeros_like(weight).index_add(0, state, weight)[state]
        mean = torch.zeros_like(reached[-1], dtype=torch.float64)
        mean = mean.index_add(0, state, weight / total * reached[-1])
        reached.append(mean[state].to(outcome.dtype))
    return torch.stack(reached[::-1], 1)


def mask_extremes(
    value: Float[Tensor, "B T R"], group: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"], width: int
) -> Bool[Tensor, "B T"]:
    """Return the mask restricted to the `width` best and worst of each group in any dimension."""
    part = torch.zeros_like(mask)
    for label in group[mask].unique():
        members = (mask & (group == label)).nonzero()
        order = value[members[:, 0], members[:, 1]].argsort(dim=0, stable=True)
        chosen = members[torch.cat([order[:width], order[-width:]]).flatten()]
        part[chosen[:, 0], chosen[:, 1]] = True
    return part


@dataclass(frozen=True, kw_only=True)
class Branch(CreditEstimator):
    """Each transition earns the value of the state that it reached; a shared one counts once.

    In a comb this value is the outcome of the single sample that branched off at this step. Credit
    by branches needs `sampling.branching: Comb` or `Tree`.

    Sources: TempFlow-GRPO, arXiv:2508.04324 (combs, siblings are compared); BranchGRPO,
    arXiv:2509.06040v5 (trees, nodes of equal depth are compared, pruning).
    """

    compare: Literal["siblings", "depth", "mixed"] = "siblings"
    """siblings: compares transitions from the same state (TempFlow-GRPO). depth: compares all
    transitions of the prompt at the same step (BranchGRPO). mixed: siblings, and by depth those
    transitions that have none."""
    beta: PositiveFloat | None = None
    """Inverse temperature: children are weighted by softmax(beta * logp). Null: all outcomes below
    a state have equal weight."""
    width: PositiveInt | None = None
    """Number of best and of worst transitions per comparison that are trained (width pruning).
    Null: all."""
    depths: Sequence[NonNegativeInt] | None = None
    """Indices of the trained denoising steps (depth pruning). Null: all."""

    @property
    @override
    def selects(self) -> bool:
        return self.width is not None or self.depths is not None

    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Fuse the outcomes; raise ValueError if no samples share states."""
        group, mask = sibling_ids(trajectory), trajectory.trained
        _require_siblings("Branch", group, mask)
        if self.compare == "depth":
            group = prompt_step_ids(trajectory)
        elif self.compare == "mixed":
            # Each of the B T sibling ids is below B T, so the ids of prompts follow them.
            alone = torch.bincount(group[mask], minlength=group.numel())[group] == 1
            group = torch.where(alone, prompt_step_ids(trajectory) + group.numel(), group)
        if self.depths is not None:
            mask = mask & torch.isin(torch.arange(trajectory.num_steps), torch.tensor(self.depths))
        outcome = values([trajectory.num_steps])[:, 0]
        value = fuse_branches(outcome, trajectory.rows.source_row, trajectory.logp.cpu(), self.beta)
        if self.width is not None:
            mask = mask_extremes(value, group, mask, self.width)
        return StepCredit(value, group, mask)


def _require_siblings(
    name: str, group: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"], remedy: str = ""
) -> None:
    """Raise ValueError unless some trained transitions have equal ids."""
    if len(group[mask].unique()) == int(mask.sum()):
        raise ValueError(
            f"{name} compares samples that were drawn from the same state: set recipe.sampling."
            f"branching to Comb or Tree, or recipe.sampling.seeds_per_prompt to 1{remedy}"
        )


@dataclass(frozen=True, kw_only=True)
class LeafAdvantage(CreditEstimator):
    """Each transition earns the mean advantage of the leaves below it.

    Advantages compare the leaves of a prompt; `Branch` compares transitions of equal depth instead.
    The method needs `sampling.branching: Tree` and advantages.scale: given.

    Sources: TreeGRPO, arXiv:2512.08153 (children weighted by their log-probability);
    Dynamic-TreeRPO, arXiv:2509.23352v3 (plain mean, our reconstruction because its equations are
    not public).
    """

    beta: PositiveFloat | None = None
    """Inverse temperature: children are weighted by softmax(beta * logp). TreeGRPO: 1. Null: all
    leaves have equal weight."""

    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Fuse the advantages of the leaves; raise ValueError if no samples share transitions."""
        if not bool((trajectory.shared & trajectory.trained.any(0)).any()):
            raise ValueError(
                "credit by trees needs samples that share transitions: set "
                "recipe.sampling.branching to flowalign.sampling.Tree"
            )
        outcome, prompt = values([trajectory.num_steps])[:, 0], prompt_step_ids(trajectory)
        advantage = compare_in_groups(outcome, prompt[:, -1])
        value = fuse_branches(
            advantage, trajectory.rows.source_row, trajectory.logp.cpu(), self.beta
        )
        return StepCredit(value, prompt, trajectory.trained, normalised=True)


@dataclass(frozen=True, kw_only=True)
class MixedAdvantage(CreditEstimator):
    """Each transition earns (1 - share) A_prompt + share A_siblings, two advantages of its outcome.

    A_prompt compares the samples of the prompt at the same step, and A_siblings those that were
    drawn from the same state. Each is the outcome minus the mean of the others, so both and all
    mixtures are unbiased. A transition without siblings earns A_prompt. The method needs
    advantages.scale: given, and siblings, for example from a `Comb` with common noise.

    The method is our own: A_prompt + lambda A_siblings with lambda = share / (1 - share), scaled to
    keep the size of the gradient.
    """

    share: UnitInterval | None = None
    """Share of the siblings. 0: outcomes only, Flow-GRPO with advantages.scale leave_one_out. 1:
    siblings only. Null: for each step and reward dimension, the share with the least variance in
    the other prompts of this process, which does not depend on the samples that it weighs; with a
    single prompt, in this prompt."""

    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Compare the outcomes twice and mix; raise ValueError if no samples share states."""
        mask, state = trajectory.trained, sibling_ids(trajectory)
        group = prompt_step_ids(trajectory)
        if self.share != 0:
            _require_siblings("MixedAdvantage", state, mask, ", or credit.share to 0")
        outcome = values([trajectory.num_steps])
        value = outcome.expand(-1, trajectory.num_steps, -1)
        chosen, group, state = value[mask], group[mask], state[mask]
        prompt = compare_in_groups(chosen, group, "leave_one_out")
        siblings = compare_in_groups(chosen, state, "leave_one_out")
        share = self.share
        if share is None:
            share = least_variance_share(prompt, siblings, group, trajectory.num_steps)
        _, index, size = state.unique(return_inverse=True, return_counts=True)
        share = torch.where(size[index, None] > 1, torch.as_tensor(share), 0.0)
        credit = torch.zeros_like(value)
        credit[mask] = (1 - share) * prompt + share * siblings
        return StepCredit(credit, prompt_step_ids(trajectory), mask, normalised=True)


def least_variance_share(
    prompt: Float[Tensor, "n R"],
    siblings: Float[Tensor, "n R"],
    group: Int[Tensor, "n"],
    num_steps: int,
) -> Float[Tensor, "n R"]:
    """Return the share a in [0, 1] of `siblings` with the least mean square of the mixture.

    For the difference d = prompt - siblings it is sum(prompt d) / sum(d^2), over the transitions of
    equal step in all other prompts. `group` is prompt * num_steps + step. It is 0 without
    differences.
    """
    difference = (prompt - siblings).nan_to_num()
    moments = torch.stack([prompt.nan_to_num() * difference, difference**2], 1)
    ids, index = group.unique(return_inverse=True)
    own = moments.new_zeros(len(ids), *moments.shape[1:]).index_add(0, index, moments)
    step = ids % num_steps
    total = own.new_zeros(num_steps, *own.shape[1:]).index_add(0, step, own)[step]
    alone = torch.bincount(step, minlength=num_steps)[step] == 1
    product, square = torch.where(alone[:, None, None], total, total - own).unbind(1)
    share = product / torch.where(square > 0, square, 1.0)
    return share.clamp(0, 1)[index]


@dataclass(frozen=True, kw_only=True)
class NextLatent(CreditEstimator):
    """Each transition earns the latent reward of its next state, without completion or decoding.

    It needs `sampling.branching: Comb` or `Tree`. The outcome is only logged.

    Source: the Step-wise GRPO of DRM, arXiv:2605.25661, from its page. Siblings are drawn from the
    same state, and advantages are local to the step. The released code has no such loop; the
    candidate that continues is not known. Here, the branching of the rollout decides it.
    """

    reward: LatentReward
    """Reward model of noisy latents; it must return the weighted reward dimensions."""

    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Score the state after each trained step; raise ValueError if no samples are siblings."""
        group, mask = sibling_ids(trajectory), trajectory.trained
        _require_siblings("NextLatent", group, mask)
        steps = mask.any(0).nonzero()[:, 0].tolist()
        reached = values.scored([k + 1 for k in steps], self.reward)
        value = reached.new_zeros(len(reached), trajectory.num_steps, reached.shape[-1])
        value[:, steps] = reached
        return StepCredit(value, group, mask)
