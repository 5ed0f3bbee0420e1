"""Search among noises for each picture: a tree of states that is pruned by their values.

It trains nothing. Without pruning it is best-of-N: `width` samples, of which the best is kept.

Source: the tree of partial results that MURE, whose code and formulas were not found, prunes by a
model of rewards; that states stand for partial results, and the whole of this sampler, is ours.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.functional.transition import FlowSDE, Kernel, sample_next, transition
from flowalign.sampling.complete_states import evaluate_velocity, take_rows
from flowalign.sampling.inference import encode_once
from flowalign.sampling.settings import NoiseLevel
from flowalign.types import Cond, LatentReward, Policy, Request
from flowalign.types.completion import Completion
from flowalign.types.ranges import PositiveInt, require_ranges

Score = Callable[[Float[Tensor, "m *latent"], Sequence[Request]], Float[Tensor, "m"]]
"""Returns the weighted reward of clean latents."""
Rate = Callable[[Float[Tensor, "m *latent"], Float[Tensor, ""], Cond], Float[Tensor, "m"]]
"""Returns the weighted reward of noisy latents, given their level and conditioning."""


@dataclass(frozen=True, kw_only=True)
class SearchCost:
    """Counts what one picture costs."""

    evaluations: int
    """Whole network evaluations."""
    scored: int
    """Latents that are decoded and scored."""
    rated: int = 0
    """Noisy latents that a reward of such rates."""
    share: float = 0.0
    """Share of an evaluation that rating one costs."""

    def samples(self, num_steps: int, per_velocity: int) -> float:
        """Return how many samples without pruning need as many network evaluations."""
        return (self.evaluations + self.share * self.rated) / (num_steps * per_velocity)


@dataclass(frozen=True, kw_only=True)
class Search:
    """Configures the tree of one picture."""

    width: PositiveInt = 8
    """Initial noises."""
    prune: Sequence[PositiveInt] = ()
    """States that are valued, by the number of steps that lead to them; the best stay. Empty: none,
    which is best-of-N."""
    keep: PositiveInt = 1
    """States that stay at each pruning."""
    branches: PositiveInt = 1
    """States that each of these becomes in the next step, by noise of their own. 1: it takes a step
    without noise."""
    eta: NoiseLevel = 0.7
    """Noise level of the steps that branch."""
    kernel: Kernel = field(default_factory=FlowSDE)
    """Transition family of the steps that branch."""
    value: Completion | LatentReward = Completion(max_steps=1)  # noqa: RUF009 (frozen)
    """Value of a state: the reward of its completion by ODE, by default of its one-step estimate,
    which costs no evaluation; or a reward of noisy latents, which costs no decode."""

    def __post_init__(self) -> None:
        """Reject trees that prune nothing, or that grow."""
        require_ranges(self, "search")
        if list(self.prune) != sorted({*self.prune}):
            raise ValueError(f"search.prune is {list(self.prune)}; give rising numbers of steps")
        after = self.keep * self.branches
        if self.prune and not (self.keep < self.width and after <= self.width):
            raise ValueError(
                f"search keeps {self.keep} of {self.width} states with {self.branches} branches "
                "each: keep fewer than width, and no more branches than width / keep"
            )
        if len(self.prune) > 1 and self.branches == 1:
            raise ValueError(
                f"search.prune is {list(self.prune)} with one branch, so that the second pruning "
                "drops nothing: give one number, or at least 2 branches"
            )
        if not self.prune and (self.keep, self.branches) != (1, 1):
            raise ValueError("search.prune is empty, so leave keep and branches out, or set it")
        if isinstance(self.value, Completion) and not self.value.follows_rollout:
            raise ValueError("search.value completes by other weights or guidance: leave these out")

    def check(self, num_steps: int) -> None:
        """Raise ValueError for prunings that a sampler of so many steps does not reach."""
        if self.prune and self.prune[-1] >= num_steps:
            raise ValueError(
                f"search.prune is {list(self.prune)}; a sampler of {num_steps} steps has states 1 "
                f"to {num_steps - 1} on the way"
            )

    def cost(self, num_steps: int, per_velocity: int) -> SearchCost:
        """Return what one picture costs, known before any weight is read."""
        alive, evaluations, scored, rated, share = self.width, 0, 0, 0, 0.0
        for k in range(num_steps):
            if k in self.prune and isinstance(self.value, LatentReward):
                rated, share = rated + alive, self.value.evaluation_share
                alive = self.keep  # valued before its velocity is asked for
            evaluations += alive * per_velocity
            if k in self.prune and isinstance(self.value, Completion):
                evaluations += alive * per_velocity * self.value.num_evaluations(k, num_steps)
                scored += alive
            alive = self.keep * self.branches if k in self.prune else alive
        return SearchCost(evaluations=evaluations, scored=scored + alive, rated=rated, share=share)


@torch.no_grad()
def search(
    policy: Policy,
    score: Score,
    requests: Sequence[Request],
    cfg: Search,
    num_steps: int,
    generators: Sequence[torch.Generator],
    micro_batch: int,
    rate: Rate | None = None,
) -> Float[Tensor, "n *latent"]:
    """Return the best clean latent that the tree of each request finds.

    A request's own generator makes all of its draws. `rate` values states where `cfg.value` is a
    reward of noisy latents.
    """
    tree = _Tree(policy, score, requests, cfg, policy.schedule(num_steps), micro_batch)
    x = torch.cat([policy.noise(cfg.width, generator) for generator in generators])
    for k in range(num_steps):
        branches = 1
        if k in cfg.prune and rate:
            x = x[tree.best(tree.rate_states(rate, x, k))]
        v = tree.velocity(x, k)
        if k in cfg.prune:
            if isinstance(cfg.value, Completion):
                best = tree.best(tree.score_completions(cfg.value, x, v, k))
                x, v = x[best], v[best]
            branches = cfg.branches
        x = tree.step(x, v, k, branches, generators)
    return x[tree.best(tree.score_states(x), 1)]


class _Tree:
    """Values, prunes and moves the states of all requests together; each has equally many."""

    def __init__(
        self,
        policy: Policy,
        score: Score,
        requests: Sequence[Request],
        cfg: Search,
        sigmas: Float[Tensor, "S"],
        micro_batch: int,
    ):
        self.policy, self.score, self.requests, self.cfg = policy, score, requests, cfg
        self.sigmas, self.micro_batch = sigmas, micro_batch
        self.cond, self.row = encode_once(policy, requests)

    def velocity(self, x: Tensor, k: int) -> Tensor:
        """Return the velocities of states k."""
        rows, size = self._rows(x), self.micro_batch
        return evaluate_velocity(self.policy, x, self.sigmas[k], self.cond, rows, size)

    def rate_states(self, rate: Rate, x: Tensor, k: int) -> Float[Tensor, "m"]:
        """Return what a reward of noisy latents says of states k."""
        size = self.micro_batch
        parts = zip(x.split(size), self._rows(x).split(size), strict=True)
        conds = ((states, take_rows(self.cond, rows)) for states, rows in parts)
        return torch.cat([rate(states, self.sigmas[k], cond) for states, cond in conds])

    def score_completions(
        self, how: Completion, x: Tensor, v: Tensor, k: int
    ) -> Float[Tensor, "m"]:
        """Return the rewards of completions of states k, whose velocities are v."""
        for here, there in pairwise(how.path(k, len(self.sigmas) - 1)):
            direction = v if here == k else self.velocity(x, here)
            x = x + (self.sigmas[there] - self.sigmas[here]) * direction
        return self.score_states(x)

    def _rows(self, x: Float[Tensor, "m *latent"]) -> Int[Tensor, "m"]:
        """Return the row of the conditioning of each state."""
        return self.row.repeat_interleave(len(x) // len(self.row)).to(x.device)

    def score_states(self, x: Float[Tensor, "m *latent"]) -> Float[Tensor, "m"]:
        """Return the rewards of clean latents."""
        each = len(x) // len(self.requests)
        return self.score(x, [request for request in self.requests for _ in range(each)])

    def best(self, value: Float[Tensor, "m"], keep: int | None = None) -> Int[Tensor, "k"]:
        """Return the rows of the best states of each request; of equal ones the first."""
        table = value.unflatten(0, (len(self.requests), -1))
        # Stable, so that equal values give the same tree on every machine.
        order = table.argsort(dim=1, descending=True, stable=True)
        chosen = order[:, : keep or self.cfg.keep].sort(dim=1).values
        starts = torch.arange(len(table), device=value.device)[:, None] * table.shape[1]
        return (chosen + starts).flatten()

    def step(
        self,
        x: Tensor,
        v: Tensor,
        k: int,
        branches: int,
        generators: Sequence[torch.Generator],
    ) -> Tensor:
        """Return the next states, several of each one if it branches."""
        eta = self.cfg.eta if branches > 1 else 0.0
        x, v = x.repeat_interleave(branches, 0), v.repeat_interleave(branches, 0)
        level = torch.full((len(x),), eta, device=x.device)
        to = transition(self.cfg.kernel, x, v, self.sigmas, k, level)
        if branches == 1:
            return to.mean
        shape = (len(x) // len(generators), *x.shape[1:])
        noise = torch.cat([torch.randn(shape, generator=one) for one in generators])
        return sample_next(to, noise.to(x.device))
