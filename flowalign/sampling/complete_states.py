"""Complete many intermediate states by ODE in shared batches, for step-level credit."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.types import (
    Cond,
    CreditEstimator,
    LatentReward,
    PastOutcomes,
    SharedRows,
    StepCredit,
    Trajectory,
    ValueFunction,
    VelocityField,
)
from flowalign.types.trajectory import Completion
from flowalign.utils.costs import stage

CompletionRequest = tuple[int, Completion]
"""Index of a state, and the method of its completion."""


class BatchedCompletion:
    """Completion of many intermediate states in shared batches.

    All completions at the same sigma are evaluated in one batch, and the first step reuses the
    velocity of the rollout. A completion has one row per distinct state.
    """

    def __init__(self, trajectory: Trajectory, requests: Collection[CompletionRequest]):
        self.trajectory = trajectory
        num_steps = trajectory.num_steps
        paths = {request: request[1].path(request[0], num_steps) for request in requests}
        self.ahead = {request: path for request, path in paths.items() if len(path) > 1}
        """Remaining schedule indices of each completion, starting with the current one."""
        self.at: dict[CompletionRequest, Tensor] = {}
        """Current state of each started completion."""

    def step(
        self,
        field: VelocityField,
        k: int,
        x: Float[Tensor, "n *latent"],
        rows: Int[Tensor, "n"],
        micro_batch: int,
    ) -> Float[Tensor, "n *latent"]:
        """Return the velocities of x, the states k of samples `rows`; advance all completions."""
        active = [request for request in self.at if self.ahead[request][0] == k]
        shared = self.trajectory.rows
        samples = torch.cat([rows, *(shared.unique_rows(request[0]) for request in active)])
        states = torch.cat([x, *(self.at[request] for request in active)])
        if not len(states):
            return x
        prompt = (samples // self.trajectory.group_size).to(states.device)
        sigma, cond = self.trajectory.sigmas[k], self.trajectory.cond
        v = evaluate_velocity(field, states, sigma, cond, prompt, micro_batch)
        own, *others = v.split([len(x), *(len(self.at[request]) for request in active)])
        for request, part in zip(active, others, strict=True):
            self._advance(request, self.at[request], part)
        for request in self.ahead:
            if request[0] == k and request not in self.at:
                # The first step of a completion reuses the velocity of the rollout.
                self._advance(request, x, own)
        return own

    def _advance(self, request: CompletionRequest, x: Tensor, v: Tensor) -> None:
        here, there = self.ahead[request][:2]
        self.ahead[request] = self.ahead[request][1:]
        self.at[request] = x + (self.trajectory.sigmas[there] - self.trajectory.sigmas[here]) * v


@stage("sample")
@torch.no_grad()
def complete(
    field: VelocityField,
    trajectory: Trajectory,
    requests: Collection[CompletionRequest],
    micro_batch: int,
) -> dict[CompletionRequest, Float[Tensor, "n *latent"]]:
    """Return completed states after a rollout, one row per distinct state.

    Use it for velocity fields other than the rollout's. It makes at most T sequential calls and
    evaluates the first velocity of every completion as well.
    """
    completion = BatchedCompletion(trajectory, requests)
    no_states = trajectory.state(trajectory.num_steps, slice(0))
    for k in range(trajectory.num_steps):
        for request in requests:
            if request[0] == k:
                completion.at[request] = trajectory.unique_states(k)
        completion.step(field, k, no_states, torch.empty(0, dtype=torch.long), micro_batch)
    return completion.at


def evaluate_velocity(
    field: VelocityField,
    x: Float[Tensor, "n *latent"],
    sigma: Float[Tensor, "*n"],
    cond: Cond,
    row: Int[Tensor, "n"],
    micro_batch: int,
) -> Float[Tensor, "n *latent"]:
    """Evaluate `field.velocity` in micro-batches; sample i is conditioned on row[i] of cond."""
    parts = x.split(micro_batch)
    sigmas = sigma.split(micro_batch) if sigma.ndim else (sigma,) * len(parts)
    chunks = zip(parts, sigmas, row.split(micro_batch), strict=True)
    return torch.cat([field.velocity(part, s, take_rows(cond, rows)) for part, s, rows in chunks])


def take_rows(cond: Cond, rows: Int[Tensor, "n"]) -> dict[str, Tensor]:
    """Return the given rows of every conditioning tensor."""
    return {name: value[rows] for name, value in cond.items()}


@dataclass(frozen=True)
class CreditRequirements:
    """Requirements of a credit method on a rollout, found with a trajectory of zeros."""

    credit: StepCredit
    """Credit that the method assigned to the zeros."""
    requested: tuple[CompletionRequest, ...]
    """States that the method requests values for."""
    read: frozenset[int]
    """Indices of the states that the method reads directly."""
    observed: frozenset[int]
    """Indices of the states with features that the method or its critic reads."""
    predicted: frozenset[int]
    """Indices of the states with outcomes that the critic predicts."""
    history: int
    """Number of earlier training steps with outcomes that the method uses."""
    scored: tuple[tuple[LatentReward, int], ...] = ()
    """Pairs of a latent reward and the index of a state that it scores for the method."""


def credit_requirements(
    method: CreditEstimator, empty: Trajectory, how: Completion
) -> CreditRequirements:
    """Return the requirements of a credit method on a rollout.

    Raises:
        ValueError: The method cannot be applied to trajectories with the layout of `empty`.
    """
    values, states = _RecordedValues(type(method).__name__, empty, how), _Zeros(empty.rows)
    hidden = _Zeros(empty.rows)
    credit = method(replace(empty, states=states, hidden=hidden), values)
    requested = tuple(sorted(values.requested, key=lambda request: (request[0], str(request[1]))))
    observed = frozenset(hidden.read | values.critic_read)
    return CreditRequirements(
        credit,
        requested,
        frozenset(states.read | {k for _, k in values.scores}),
        observed,
        frozenset(values.critic_read),
        values.history,
        tuple(sorted(values.scores, key=lambda each: each[1])),
    )


class _RecordedValues(ValueFunction):
    """Value function that returns 0 and records the requested states."""

    def __init__(self, method: str, empty: Trajectory, how: Completion):
        self.method, self.empty, self.how = method, empty, how
        self.requested: set[CompletionRequest] = set()
        self.history = 0
        self.critic_read: set[int] = set()
        self.scores: set[tuple[LatentReward, int]] = set()

    def __call__(self, ks: Sequence[int], how: Completion | None = None) -> Tensor:
        end = self.empty.num_steps
        self._check("value", ks, end)
        self.requested.update((k, how or self.how if k < end else self.how) for k in ks)
        return torch.zeros(len(self.empty.logp), len(ks), 1)

    def past(self, num_steps: int) -> PastOutcomes | None:
        self.history = max(self.history, num_steps)
        return None

    def predicted(self, ks: Sequence[int]) -> Tensor:
        self._check("prediction", ks, self.empty.num_steps - 1)
        self.critic_read.update(ks)
        return torch.zeros(len(self.empty.logp), len(ks), 1)

    def scored(self, ks: Sequence[int], reward: LatentReward) -> Tensor:
        self._check("latent reward", ks, self.empty.num_steps)
        self.scores.update((reward, k) for k in ks)
        return torch.zeros(len(self.empty.logp), len(ks), 1)

    def _check(self, what: str, ks: Sequence[int], last: int) -> None:
        for k in ks:
            if not 0 <= k <= last:
                raise ValueError(
                    f"{self.method} asks for the {what} of state {k}; there are states 0 to {last}"
                )


class _Zeros(Mapping[int, Tensor]):
    """Zeros as placeholders for states or features, with a record of the indices that are read."""

    def __init__(self, rows: SharedRows):
        self.rows = rows
        self.read: set[int] = set()

    def __getitem__(self, k: int) -> Tensor:
        self.read.add(k)
        return torch.zeros(len(self.rows.unique_rows(k)), 1)

    def __iter__(self) -> Iterator[int]:
        return iter(self.read)

    def __len__(self) -> int:
        return len(self.read)
