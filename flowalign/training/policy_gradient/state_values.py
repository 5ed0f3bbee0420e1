"""What the states of a trajectory are worth: the oracle that credit methods ask."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from flowalign.functional.tail import Completion
from flowalign.rewards.composite import Rewards, Scoring, joined_rows, part_of
from flowalign.sampling.completion import Tail
from flowalign.types import Policy, RewardOutput, Trajectory, Values


@dataclass
class _Asked:
    """States that are decoded and being scored."""

    tails: Sequence[Tail]
    rows: Sequence[Int[Tensor, "n"]]
    """The samples that hold each state."""
    scoring: Scoring


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
        self.asked: list[_Asked] = []
        self.parts: Sequence[StateValues] = ()
        """Values of the trajectories that this one was joined from."""

    def __call__(self, ks: Sequence[int], how: Completion | None = None) -> Tensor:
        """Rewards of states ks after finishing each by ODE; NaN where a reward failed."""
        tails = [self._tail(k, how) for k in ks]
        self._join_parts()
        self.ask(tails)
        self._collect()
        places = [self.trajectory.places(k) for k in ks]
        values = [self.known[t].values[at] for t, at in zip(tails, places, strict=True)]
        return torch.stack(values, 1)

    def ask(self, tails: Sequence[Tail]) -> None:
        """Finish and decode states that are new, in chunks that go on to the rewards at once."""
        seen = {*self.known, *(tail for asked in self.asked for tail in asked.tails)}
        missing = sorted({t for t in tails if t not in seen}, key=lambda tail: tail[0])
        if not missing:
            return
        trajectory = self.trajectory
        rows = [trajectory.holders(k) for k, _ in missing]
        latents = self._latents(missing)
        shown = torch.cat([torch.isin(trajectory.holders(k), self._shown(k)) for k, _ in missing])
        groups = torch.cat([n * len(trajectory.prompts) + row // trajectory.group_size
                            for n, row in enumerate(rows)])  # fmt: skip
        scoring, kept, size = self.rewards.scoring(), [], self.micro_batch
        everything = torch.cat([latents[tail] for tail in missing]).split(size)
        chunks = torch.cat(rows).split(size), shown.split(size), groups.split(size)
        for x, row, keep, group in zip(everything, *chunks, strict=True):
            media = self.policy.decode(x).cpu()
            self.rewards.costs.decodes += len(x)
            prompts = [trajectory.prompts[int(i)] for i in row]
            scoring.add(self.rewards.batch(media, prompts, group.tolist(), self.policy.fps))
            kept.append(media[keep])
        self.asked.append(_Asked(missing, rows, scoring))
        self._keep(missing, torch.cat(kept))

    def _tail(self, k: int, how: Completion | None) -> Tail:
        finished = k == self.trajectory.num_steps
        return k, self.how if finished or how is None else how

    def _latents(self, missing: Sequence[Tail]) -> dict[Tail, Tensor]:
        trajectory, end = self.trajectory, self.trajectory.num_steps
        latents = dict(self.finish([tail for tail in missing if tail[0] < end]))
        if (end, self.how) in missing:
            latents[end, self.how] = trajectory.held(end)
        return latents

    def _keep(self, tails: Sequence[Tail], kept: Tensor) -> None:
        for tail in tails:
            wanted, at = self._shown(tail[0]).unique(return_inverse=True)
            self.media[tail], kept = kept[: len(wanted)][at], kept[len(wanted) :]

    def _collect(self) -> None:
        """Wait for the rewards of everything that was asked."""
        for asked in self.asked:
            output, start = asked.scoring.result(), 0
            for tail, row in zip(asked.tails, asked.rows, strict=True):
                self.known[tail] = part_of(output, start, start + len(row))
                start += len(row)
                self._check(tail, row)
        self.asked = []

    def _join_parts(self) -> None:
        for part in self.parts:
            part._collect()
        first, *others = self.parts or [self]
        for tail in first.known if self.parts else ():
            if all(tail in part.known for part in others):
                self.known[tail] = joined_rows([part.known[tail] for part in self.parts])
                media = torch.cat([part.media[tail] for part in self.parts])
                self.media[tail] = media[: self.pictured]
        self.parts = ()

    def _shown(self, k: int) -> Int[Tensor, "n"]:
        return self.trajectory.origin[: self.pictured, k]

    def _check(self, tail: Tail, row: Int[Tensor, "n"]) -> None:
        output = self.known[tail]
        if self.rewards.on_failure == "raise":
            prompts, rows = self.trajectory.prompts, row.tolist()
            self.rewards.require(
                output, lambda i: f"sample {rows[i]}, prompt {prompts[rows[i]]!r}",
                f" at state {tail[0]}",
            )  # fmt: skip
