"""Value intermediate states by completing, decoding and scoring them, for credit methods."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.credit.critic import FittedCritic
from flowalign.rewards.checked import RewardFailure
from flowalign.rewards.composite import Rewards, Scoring
from flowalign.types import (
    LatentReward,
    PastOutcomes,
    Policy,
    RewardOutput,
    Trajectory,
    ValueFunction,
)
from flowalign.types.trajectory import Completion, CompletionRequest, take_rows
from flowalign.utils.costs import stage
from flowalign.utils.errors import require_known


@dataclass
class _Pending:
    """States that are decoded and currently being scored."""

    requests: Sequence[CompletionRequest]
    """States to score."""
    rows: Sequence[Int[Tensor, "_"]]
    """Distinct rows of each state."""
    scoring: Scoring
    """Scores in progress."""


class OutcomeHistory:
    """Outcomes of the last `length` training steps, of the prompts of all processes."""

    def __init__(self, length: int):
        self.length = length
        self.steps: list[dict[str, list[list[float | None]]]] = []
        """Outcomes of each step by request key; None if a reward failed."""

    def add(self, keys: Sequence[str], outcome: Float[Tensor, "n R"]) -> None:
        """Add the outcomes of a step with equal numbers of samples per request."""
        if not self.length:
            return
        found: dict[str, list[list[float | None]]] = {}
        for key, rows in zip(keys, outcome.chunk(len(keys)), strict=True):
            plain = [[x if math.isfinite(x) else None for x in row] for row in rows.tolist()]
            found[key] = found.get(key, []) + plain
        self.steps = [*self.steps, found][-self.length :]

    def of(self, keys: Sequence[str], like: Float[Tensor, "n R"], num_steps: int) -> PastOutcomes:
        """Return past outcomes of the requests `keys`, with the dimensions of `like`."""
        known = [
            (i, row)
            for i, key in enumerate(keys)
            for step in self.steps[-num_steps:]
            for row in step.get(key, [])
        ]
        rows = [[math.nan if x is None else x for x in row] for _, row in known]
        value = like.new_tensor(rows).reshape(len(known), like.shape[1])
        return PastOutcomes(value, torch.tensor([i for i, _ in known], dtype=torch.long))

    def state(self) -> list[dict[str, list[list[float | None]]]]:
        """Return the state for a checkpoint."""
        return self.steps

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Restore the state of a checkpoint."""
        self.steps = [dict(step) for step in state]


@dataclass(frozen=True)
class Experience:
    """State from earlier training steps that values read."""

    critic: FittedCritic | None = None
    """Critic fitted to their outcomes."""
    history: OutcomeHistory = field(default_factory=lambda: OutcomeHistory(0))
    """Their outcomes."""


NO_EXPERIENCE = Experience()


class CompletionValues(ValueFunction):
    """Value function of one trajectory; each state is completed and scored at most once."""

    pictured = 6
    """Number of samples with decoded images that are kept for charts."""

    def __init__(
        self,
        policy: Policy,
        rewards: Rewards,
        trajectory: Trajectory,
        finish: Callable[[Sequence[CompletionRequest]], Mapping[CompletionRequest, Tensor]],
        how: Completion,
        micro_batch: int,
        earlier: Experience = NO_EXPERIENCE,
        parts: Sequence["CompletionValues"] = (),
    ):
        self.policy, self.rewards, self.trajectory = policy, rewards, trajectory
        self.finish, self.how, self.micro_batch = finish, how, micro_batch
        self.critic, self.history = earlier.critic, earlier.history
        self.known: dict[CompletionRequest, RewardOutput] = {}
        self.media: dict[CompletionRequest, Tensor] = {}
        """Decoded images of the requested states, for the first `pictured` samples."""
        self.pending: list[_Pending] = []
        self.parts = parts
        """Values of the trajectories that were concatenated to this trajectory."""

    def __call__(self, ks: Sequence[int], how: Completion | None = None) -> Tensor:
        """Return the rewards of the completed states ks; NaN if a reward failed."""
        requests = [self._request(k, how) for k in ks]
        self._join_parts()
        self.request(requests)
        self._collect()
        index = [self.trajectory.rows.row_index(k) for k in ks]
        values = [self.known[r].values[at] for r, at in zip(requests, index, strict=True)]
        return torch.stack(values, 1)

    def outcome_map(self, name: str) -> Float[Tensor, "B *place"]:
        """Return a reward model's spatial map of every finished sample."""
        last = self.trajectory.num_steps
        self([last])
        known = self.known[self._request(last, None)].maps[name]
        return known[self.trajectory.rows.row_index(last)]

    def past(self, num_steps: int) -> PastOutcomes | None:
        """Return the outcomes of the trajectory's prompts in earlier training steps."""
        keys = [request.key for request in self.trajectory.requests[:: self.trajectory.group_size]]
        return self.history.of(keys, self([self.trajectory.num_steps])[:, 0], num_steps)

    def predicted(self, ks: Sequence[int]) -> Tensor:
        """Return the critic's predicted outcomes for states ks, relative to the prompt's mean."""
        assert self.critic is not None, "settings are refused without the critic that credit reads"
        trajectory, num_rewards = self.trajectory, len(self.rewards.dims)
        found = [
            self.critic.predict(k, trajectory.features(k), trajectory.prompt, num_rewards)
            for k in ks
        ]
        return torch.stack(found, 1)

    @torch.no_grad()
    def scored(self, ks: Sequence[int], reward: LatentReward) -> Tensor:
        """Return the latent rewards of the states ks, NaN for dimensions without one.

        Raises:
            RewardFailure: A weighted score is not finite, and `on_failure` is raise.
        """
        reward.attach(self.policy)
        return torch.stack([self._score_latents(k, reward) for k in ks], 1)

    def _score_latents(self, k: int, reward: LatentReward) -> Float[Tensor, "B R"]:
        rewards, trajectory, size = self.rewards, self.trajectory, self.micro_batch
        rows = trajectory.rows.unique_rows(k)
        asked = (rows // trajectory.group_size).to(trajectory.device)
        states = zip(trajectory.unique_states(k).split(size), asked.split(size), strict=True)
        with rewards.costs.paused():  # partial evaluations would be counted as whole ones
            sigma, cond = trajectory.sigmas[k], trajectory.cond
            parts = [reward.score(x, sigma, take_rows(cond, row)) for x, row in states]
        rewards.costs.count_share(reward.evaluation_share, len(rows))
        found = torch.cat([part.float().cpu() for part in parts])
        table = torch.full((len(found), len(rewards.dims)), torch.nan)
        for column, dim in enumerate(rewards.dims):
            if dim in reward.dims:
                table[:, column] = found[:, reward.dims.index(dim)]
        usable = rewards.usable(table.isfinite())
        if rewards.on_failure == "raise" and not usable.all():
            raise RewardFailure(
                f"the latent reward of {int((~usable).sum())} of {len(usable)} states {k} is not "
                "finite.\nSet on_failed_reward to drop_sample to continue without these samples."
            )
        return trajectory.rows.expand(table, k)

    def request(self, requests: Sequence[CompletionRequest]) -> None:
        """Complete and decode new states, and submit them to the rewards in chunks."""
        seen = {*self.known, *(request for pending in self.pending for request in pending.requests)}
        missing = sorted({t for t in requests if t not in seen}, key=lambda request: request[0])
        if not missing:
            return
        trajectory = self.trajectory
        rows = [trajectory.rows.unique_rows(k) for k, _ in missing]
        end = trajectory.num_steps
        latents = dict(self.finish([request for request in missing if request[0] < end]))
        if (end, self.how) in missing:
            latents[end, self.how] = trajectory.unique_states(end)
        shown = torch.cat(
            [torch.isin(trajectory.rows.unique_rows(k), self._shown(k)) for k, _ in missing]
        )
        group, count = trajectory.group_size, len(trajectory.requests)
        groups = torch.cat([n * count + row // group for n, row in enumerate(rows)])
        scoring, kept, size = self.rewards.scoring(), [], self.micro_batch
        everything = torch.cat([latents[request] for request in missing]).split(size)
        chunks = torch.cat(rows).split(size), shown.split(size), groups.split(size)
        for x, row, keep, group in zip(everything, *chunks, strict=True):
            asked = [trajectory.requests[int(i)] for i in row]
            with stage("decode"):
                batch = self.rewards.decode(self.policy, x, asked, group.tolist())
            self.rewards.costs.decodes += len(x)
            scoring.add(batch)
            kept.append(batch.media[keep])
        self.pending.append(_Pending(missing, rows, scoring))
        self._keep(missing, torch.cat(kept))

    def _request(self, k: int, how: Completion | None) -> CompletionRequest:
        finished = k == self.trajectory.num_steps
        return k, self.how if finished or how is None else how

    def _keep(self, requests: Sequence[CompletionRequest], kept: Tensor) -> None:
        for request in requests:
            wanted, at = self._shown(request[0]).unique(return_inverse=True)
            self.media[request], kept = kept[: len(wanted)][at], kept[len(wanted) :]

    def _collect(self) -> None:
        """Wait for the rewards of all requested states."""
        for pending in self.pending:
            output, start = pending.scoring.result(), 0
            for request, row in zip(pending.requests, pending.rows, strict=True):
                self.known[request] = output.slice(start, start + len(row))
                start += len(row)
                self._check(request, row)
        self.pending = []

    def _join_parts(self) -> None:
        for part in self.parts:
            part._collect()
        first, *others = self.parts or [self]
        for request in first.known if self.parts else ():
            if all(request in part.known for part in others):
                self.known[request] = RewardOutput.concat(
                    [part.known[request] for part in self.parts]
                )
                media = torch.cat([part.media[request] for part in self.parts])
                self.media[request] = media[: self.pictured]
        self.parts = ()

    def _shown(self, k: int) -> Int[Tensor, "n"]:
        return self.trajectory.rows.source_row[: self.pictured, k]

    def _check(self, request: CompletionRequest, row: Int[Tensor, "n"]) -> None:
        output = self.known[request]
        if self.rewards.on_failure == "raise":
            prompts, rows = self.trajectory.prompts, row.tolist()
            self.rewards.require(
                output,
                lambda i: f"sample {rows[i]}, prompt {prompts[rows[i]]!r}",
                f" at state {request[0]}",
            )


def check_latent_dims(rewards: Rewards, reward: LatentReward, key: str) -> None:
    """Raise ValueError unless a latent reward has all dimensions with a nonzero weight."""
    what = f"{key} credits states by a latent reward, which does not score the weighted reward"
    require_known(what, rewards.weighted_dims, reward.dims)
