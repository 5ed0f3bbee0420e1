"""Several reward models seen as one: dimensions side by side, a weight each; no failure scores."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowalign.completion import Tail
from flowalign.costs import Costs
from flowalign.functional.tail import Completion
from flowalign.types import MediaBatch, Policy, RewardModel, RewardOutput, Trajectory, Values

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


class StateValues(Values):
    """The values of one trajectory: each state is finished, decoded and scored at most once."""

    pictured = 6
    """Of how many samples the decoded media are kept, for a person to look at."""

    def __init__(
        self,
        policy: Policy,
        rewards: Rewards,
        trajectory: Trajectory,
        finish: Callable[[Sequence[Tail]], Mapping[Tail, Tensor]],
        how: Completion,
        micro_batch: int,
    ):
        self.policy, self.rewards, self.trajectory = policy, rewards, trajectory
        self.finish, self.how, self.micro_batch = finish, how, micro_batch
        self.known: dict[Tail, RewardOutput] = {}
        self.media: dict[Tail, Tensor] = {}
        """Of states k of the first `pictured` samples."""

    def __call__(self, ks: Sequence[int], how: Completion | None = None) -> Tensor:
        """Rewards of states ks after finishing each by ODE; NaN where a reward failed."""
        tails = [self._tail(k, how) for k in ks]
        missing = sorted({t for t in tails if t not in self.known}, key=lambda tail: tail[0])
        if missing:
            self._score(missing)
        places = [self.trajectory.places(k) for k in ks]
        values = [self.known[t].values[at] for t, at in zip(tails, places, strict=True)]
        return torch.stack(values, 1)

    def _tail(self, k: int, how: Completion | None) -> Tail:
        finished = k == self.trajectory.num_steps
        return k, self.how if finished or how is None else how

    def _score(self, missing: Sequence[Tail]) -> None:
        """All missing states in one go, in chunks that go through decoder and rewards together."""
        trajectory, end = self.trajectory, self.trajectory.num_steps
        latents = dict(self.finish([tail for tail in missing if tail[0] < end]))
        if (end, self.how) in missing:
            holders = trajectory.holders(end).to(trajectory.states.device)
            latents[end, self.how] = trajectory.states[holders, end].float()
        rows = [trajectory.holders(k) for k, _ in missing]
        shown = torch.cat([torch.isin(trajectory.holders(k), self._shown(k)) for k, _ in missing])
        media, outputs = [], []
        everything = torch.cat([latents[tail] for tail in missing]).split(self.micro_batch)
        chunks = torch.cat(rows).split(self.micro_batch), shown.split(self.micro_batch)
        for x, row, keep in zip(everything, *chunks, strict=True):
            pictures = self.policy.decode(x).cpu()
            self.rewards.costs.decodes += len(x)
            batch = MediaBatch(pictures, [trajectory.prompts[int(i)] for i in row])
            outputs.append(self.rewards.score(batch))
            media.append(pictures[keep])
        start, kept = 0, torch.cat(media)
        for tail, row in zip(missing, rows, strict=True):
            self.known[tail] = _part(outputs, self.micro_batch, start, start + len(row))
            start += len(row)
            self._check(tail, row)
            wanted, at = self._shown(tail[0]).unique(return_inverse=True)
            self.media[tail], kept = kept[: len(wanted)][at], kept[len(wanted) :]

    def _shown(self, k: int) -> Int[Tensor, "n"]:
        return self.trajectory.origin[: self.pictured, k]

    def _check(self, tail: Tail, row: Int[Tensor, "n"]) -> None:
        output = self.known[tail]
        usable = self.rewards.usable(output.valid)
        if self.rewards.on_failure == "raise" and not usable.all():
            i = int((~usable).nonzero()[0])
            raise RewardFailure(
                f"{int((~usable).sum())} of {len(usable)} rewards failed at state {tail[0]}. First:"
                f" sample {int(row[i])}, prompt {self.trajectory.prompts[int(row[i])]!r}: "
                f"{output.reasons[i]}.\n"
                "Set on_failed_reward to drop_sample or drop_group to go on without such samples."
            )


def _part(outputs: Sequence[RewardOutput], size: int, start: int, stop: int) -> RewardOutput:
    """Rows start to stop of outputs that hold `size` rows each."""
    reasons = {size * j + i: why for j, out in enumerate(outputs) for i, why in out.reasons.items()}
    return RewardOutput(
        torch.cat([out.values for out in outputs])[start:stop],
        torch.cat([out.valid for out in outputs])[start:stop],
        {i - start: why for i, why in reasons.items() if start <= i < stop},
    )


def surviving(
    usable: Bool[Tensor, "B T"], group_size: int, on_failure: OnFailure
) -> Bool[Tensor, "B T"]:
    """Transitions that may be trained: the usable ones, or only whole usable groups."""
    if on_failure != "drop_group":
        return usable
    whole = usable.unflatten(0, (-1, group_size)).all(1)
    return whole.repeat_interleave(group_size, 0)
