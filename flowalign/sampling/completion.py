"""Finishing intermediate states by ODE, all together: what makes step-level credit affordable."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.functional.tail import Completion
from flowalign.types import Cond, CreditEstimator, StepCredit, Trajectory, Values, VelocityField

Tail = tuple[int, Completion]
"""A state to finish, and how."""


class Tails:
    """A wavefront: tails that stand at the same point of the schedule advance in one batch.

    A tail of state k has one row per holder of that state. It begins where a walk along the
    schedule passes k, from the velocity that the walk itself needs there.
    """

    def __init__(self, trajectory: Trajectory, finish: Collection[Tail]):
        self.trajectory = trajectory
        num_steps = trajectory.num_steps
        self.ahead = {tail: tail[1].path(tail[0], num_steps) for tail in finish}
        self.ahead = {tail: path for tail, path in self.ahead.items() if len(path) > 1}
        self.at: dict[Tail, Tensor] = {}

    def step(
        self,
        field: VelocityField,
        k: int,
        x: Float[Tensor, "n *latent"],
        rows: Int[Tensor, "n"],
        micro_batch: int,
    ) -> Float[Tensor, "n *latent"]:
        """Velocities of the walkers x of samples `rows` at point k; moves all tails from there."""
        standing = [tail for tail in self.at if self.ahead[tail][0] == k]
        samples = torch.cat([rows, *(self.trajectory.holders(tail[0]) for tail in standing)])
        states = torch.cat([x, *(self.at[tail] for tail in standing)])
        if not len(states):
            return x
        prompt = (samples // self.trajectory.group_size).to(states.device)
        sigma, cond = self.trajectory.sigmas[k], self.trajectory.cond
        v = velocity(field, states, sigma, cond, prompt, micro_batch)
        own, *others = v.split([len(x), *(len(self.at[tail]) for tail in standing)])
        for tail, part in zip(standing, others, strict=True):
            self._move(tail, self.at[tail], part)
        for tail in self.ahead:
            if tail[0] == k and tail not in self.at:
                self._move(tail, x, own)
        return own

    def _move(self, tail: Tail, x: Tensor, v: Tensor) -> None:
        here, there = self.ahead[tail][:2]
        self.ahead[tail] = self.ahead[tail][1:]
        self.at[tail] = x + (self.trajectory.sigmas[there] - self.trajectory.sigmas[here]) * v


@torch.no_grad()
def complete(
    field: VelocityField, trajectory: Trajectory, finish: Collection[Tail], micro_batch: int
) -> dict[Tail, Float[Tensor, "n *latent"]]:
    """Clean latents of states after the rollout, one row per holder.

    For another velocity field than the rollout's: there are at most T sequential calls, and the
    first velocity of every tail is evaluated too.
    """
    tails = Tails(trajectory, finish)
    nobody = trajectory.state(trajectory.num_steps, slice(0))
    for k in range(trajectory.num_steps):
        for tail in finish:
            if tail[0] == k:
                tails.at[tail] = trajectory.held(k)
        tails.step(field, k, nobody, torch.empty(0, dtype=torch.long), micro_batch)
    return tails.at


def velocity(
    field: VelocityField,
    x: Float[Tensor, "n *latent"],
    sigma: Float[Tensor, ""],
    cond: Cond,
    row: Int[Tensor, "n"],
    micro_batch: int,
) -> Float[Tensor, "n *latent"]:
    """`field.velocity` in chunks; sample i is conditioned on row[i] of cond."""
    chunks = zip(x.split(micro_batch), row.split(micro_batch), strict=True)
    return torch.cat([field.velocity(part, sigma, take(cond, rows)) for part, rows in chunks])


def take(cond: Cond, rows: Int[Tensor, "n"]) -> dict[str, Tensor]:
    """The given rows of every conditioning tensor."""
    return {name: value[rows] for name, value in cond.items()}


@dataclass(frozen=True)
class Asked:
    """What a credit method does with a trajectory of zeros."""

    earned: StepCredit
    valued: tuple[Tail, ...]
    """The states that it wants valued."""
    read: frozenset[int]
    """The states that it looks at itself."""


def asked_states(credit: CreditEstimator, blank: Trajectory, how: Completion) -> Asked:
    """What a credit method needs. ValueError where a trajectory such as `blank` has it not."""
    asked: set[Tail] = set()
    zeros = _Zeros(blank)

    class Valued(Values):
        def __call__(self, ks: Sequence[int], how_these: Completion | None = None) -> Tensor:
            for k in ks:
                if not 0 <= k <= blank.num_steps:
                    raise ValueError(
                        f"{type(credit).__name__} asks for the value of state {k}; "
                        f"there are states 0 to {blank.num_steps}"
                    )
            asked.update((k, how_these or how if k < blank.num_steps else how) for k in ks)
            return torch.zeros(len(blank.logp), len(ks), 1)

    earned = credit(replace(blank, states=zeros), Valued())
    valued = tuple(sorted(asked, key=lambda tail: (tail[0], str(tail[1]))))
    return Asked(earned, valued, frozenset(zeros.read))


class _Zeros(Mapping[int, Tensor]):
    """States of a trajectory that was not drawn: all of them, and which of them were read."""

    def __init__(self, blank: Trajectory):
        self.blank = blank
        self.read: set[int] = set()

    def __getitem__(self, k: int) -> Tensor:
        self.read.add(k)
        return torch.zeros(len(self.blank.holders(k)), 1)

    def __iter__(self) -> Iterator[int]:
        return iter(self.read)

    def __len__(self) -> int:
        return len(self.read)
