"""Several reward models seen as one: dimensions side by side, a weight each; no failure scores."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowalign.costs import Costs
from flowalign.types import MediaBatch, Policy, RewardModel, RewardOutput, Trajectory

OnFailure = Literal["raise", "drop_sample", "drop_group"]


class RewardFailure(RuntimeError):
    """A reward could not be computed and the run was told to stop in that case."""


@dataclass
class Rewards:
    """Concatenates the dimensions of its models, in order, and carries their weights."""

    models: Sequence[RewardModel]
    weight_of: Mapping[str, float]
    on_failure: OnFailure = "raise"
    costs: Costs = field(default_factory=Costs)
    dims: tuple[str, ...] = field(init=False)
    weights: Float[Tensor, "R"] = field(init=False)

    def __post_init__(self) -> None:
        """Refuse weights that name nothing, or nothing to optimise."""
        if not self.models:
            raise ValueError("rewards is empty; name at least one reward model")
        self.dims = tuple(dim for model in self.models for dim in model.spec.dims)
        repeated = sorted({dim for dim in self.dims if self.dims.count(dim) > 1})
        if repeated:
            raise ValueError(f"reward dimensions {repeated} come from more than one model")
        unknown = sorted(self.weight_of.keys() - set(self.dims))
        if unknown:
            raise ValueError(
                f"reward_weights name unknown dimensions {unknown}; "
                f"there are {', '.join(self.dims)}"
            )
        self.weights = torch.tensor([float(self.weight_of.get(dim, 0.0)) for dim in self.dims])
        if not self.weights.isfinite().all():
            raise ValueError(f"reward_weights must be finite numbers, got {dict(self.weight_of)}")
        if not self.weights.any():
            raise ValueError(
                f"reward_weights are all zero; weight at least one of {', '.join(self.dims)}"
            )

    def score(self, batch: MediaBatch) -> RewardOutput:
        """All dimensions of all models; reasons joined."""
        parts = [model.score(batch) for model in self.models]
        self.costs.reward_calls += len(batch.prompts) * len(self.models)
        reasons: dict[int, str] = {}
        for part in parts:
            for i, why in part.reasons.items():
                reasons[i] = f"{reasons[i]}; {why}" if i in reasons else why
        return RewardOutput(
            torch.cat([p.values for p in parts], 1), torch.cat([p.valid for p in parts], 1), reasons
        )

    def usable(self, valid: Bool[Tensor, "n R"]) -> Bool[Tensor, "n"]:
        """Samples whose weighted dimensions are all valid; failed others are only not logged."""
        return valid[:, self.weights != 0].all(1)


class StateValues:
    """values(ks) of one trajectory: each state is finished, decoded and scored at most once."""

    def __init__(
        self,
        policy: Policy,
        rewards: Rewards,
        trajectory: Trajectory,
        finish: Callable[[Sequence[int]], Mapping[int, Tensor]],
        micro_batch: int,
    ):
        self.policy, self.rewards, self.trajectory = policy, rewards, trajectory
        self.finish, self.micro_batch = finish, micro_batch
        self.known: dict[int, RewardOutput] = {}

    def __call__(self, ks: Sequence[int]) -> Float[Tensor, "B K R"]:
        """Rewards of states ks after finishing each by ODE; NaN where a reward failed."""
        return torch.stack([output.values for output in self.outputs(ks)], 1)

    def outputs(self, ks: Sequence[int]) -> list[RewardOutput]:
        """Rewards with validity and reasons; what is not known yet is finished in one go."""
        missing = sorted(set(ks) - self.known.keys())
        for k, latents in self.finish(missing).items():
            media = [self.policy.decode(x).cpu() for x in latents.split(self.micro_batch)]
            batch = MediaBatch(torch.cat(media), self.trajectory.prompts)
            self.rewards.costs.decodes += len(batch.prompts)
            self.known[k] = self.rewards.score(batch)
            self._check(k)
        return [self.known[k] for k in ks]

    def _check(self, k: int) -> None:
        usable = self.rewards.usable(self.known[k].valid)
        if self.rewards.on_failure == "raise" and not usable.all():
            i = int((~usable).nonzero()[0])
            raise RewardFailure(
                f"{int((~usable).sum())} of {len(usable)} rewards failed at state {k}. "
                f"First: sample {i}, prompt {self.trajectory.prompts[i]!r}: "
                f"{self.known[k].reasons[i]}.\n"
                "Set on_failed_reward to drop_sample or drop_group to go on without such samples."
            )


def surviving(
    usable: Bool[Tensor, "B T"], group_size: int, on_failure: OnFailure
) -> Bool[Tensor, "B T"]:
    """Transitions that may be trained: the usable ones, or only whole usable groups."""
    if on_failure != "drop_group":
        return usable
    whole = usable.unflatten(0, (-1, group_size)).all(1)
    return whole.repeat_interleave(group_size, 0)
