"""Search over noises for each sample: a tree of denoising states that is pruned by value.

The search needs no training. Without pruning it is best-of-N: it draws `width` samples and keeps
the best one.

Source: pruning branches with a reward model follows MURE, for which we found no code or formulas.
Applying it to denoising states, and the rest of this sampler, is our choice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.functional.transition import FlowSDE, Kernel, sample_next, transition
from flowalign.sampling.inference import encode_once
from flowalign.sampling.sampling_settings import NoiseLevel
from flowalign.sampling.stepping import evaluate_velocity
from flowalign.types import Cond, LatentReward, Policy, Request
from flowalign.types.trajectory import Completion, take_rows
from flowalign.utils.ranges import PositiveInt, require_ranges

Score = Callable[[Float[Tensor, "m *latent"], Sequence[Request]], Float[Tensor, "m"]]
"""Function that returns the weighted reward of clean latents."""
Rate = Callable[[Float[Tensor, "m *latent"], Float[Tensor, ""], Cond], Float[Tensor, "m"]]
"""Function that returns the weighted reward of noisy latents, given noise level and
conditioning."""


@dataclass(frozen=True, kw_only=True)
class SearchCost:
    """Cost of searching for one sample."""

    evaluations: int
    """Number of whole network evaluations."""
    scored: int
    """Number of latents that are decoded and scored."""
    rated: int = 0
    """Number of noisy latents that a latent reward scores."""
    share: float = 0.0
    """Cost of scoring one noisy latent, as a share of a network evaluation."""

    def samples(self, num_steps: int, per_velocity: int) -> float:
        """Return the number of plain samples with the same number of network evaluations."""
        return (self.evaluations + self.share * self.rated) / (num_steps * per_velocity)


@dataclass(frozen=True, kw_only=True)
class Search:
    """Settings of the search tree of one sample."""

    width: PositiveInt = 8
    """Number of initial noises."""
    prune: Sequence[PositiveInt] = ()
    """Numbers of denoising steps after which the tree is pruned. Empty: no pruning, which is
    best-of-N."""
    keep: PositiveInt = 1
    """Number of states that remain after each pruning."""
    branches: PositiveInt = 1
    """Number of children of each remaining state, drawn with independent noise in the next step.
    1: one step without noise."""
    eta: NoiseLevel = 0.7
    """Noise level of the branching steps."""
    kernel: Kernel = field(default_factory=FlowSDE)
    """Transition family of the branching steps."""
    value: Completion | LatentReward = Completion(max_steps=1)  # noqa: RUF009 (frozen)
    """Value of a state: the reward of its ODE completion, or a latent reward, which needs no
    decoding. Default: the one-step estimate, which needs no further network evaluation."""

    def __post_init__(self) -> None:
        """Reject trees that do not prune, or that grow."""
        require_ranges(self, "search")
        if list(self.prune) != sorted({*self.prune}):
            raise ValueError(f"search.prune is {list(self.prune)}; give rising numbers of steps")
        after = self.keep * self.branches
        if self.prune and not (self.keep < self.width and after <= self.width):
            raise ValueError(
                f"search keeps {self.keep} of {self.width} states with {self.branches} branches "
                "each: keep fewer than width, with no more branches than width / keep"
            )
        if len(self.prune) > 1 and self.branches == 1:
            raise ValueError(
                f"search.prune is {list(self.prune)} with one branch, so that the second pruning "
                "drops nothing: give one number, or at least 2 branches"
            )
        if not self.prune and (self.keep, self.branches) != (1, 1):
            raise ValueError("search.prune is empty, so leave keep and branches out, or set it")
        if isinstance(self.value, Completion) and not self.value.follows_rollout:
            raise ValueError(
                "search.value must complete with the policy's weights and guidance: leave out "
                "weights and guidance"
            )

    def check(self, num_steps: int) -> None:
        """Raise ValueError for prunings at or after the last of `num_steps` steps."""
        if self.prune and self.prune[-1] >= num_steps:
            raise ValueError(
                f"search.prune is {list(self.prune)}; a sampler with {num_steps} steps can prune "
                f"after 1 to {num_steps - 1} steps"
            )

    def cost(self, num_steps: int, per_velocity: int) -> SearchCost:
        """Return the cost of one sample; no model is needed for it."""
        alive, evaluations, scored, rated, share = self.width, 0, 0, 0, 0.0
        for k in range(num_steps):
            if k in self.prune and isinstance(self.value, LatentReward):
                rated, share = rated + alive, self.value.evaluation_share
                alive = self.keep  # pruned before the velocity is evaluated
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
    """Return the best clean latent of each request's tree.

    All draws of a request come from its own generator. `rate` values states if `cfg.value` is a
    latent reward.
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
    """Search trees of all requests in one batch, with equal numbers of states."""

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
        """Return the latent rewards of states k."""
        size = self.micro_batch
        parts = zip(x.split(size), self._rows(x).split(size), strict=True)
        conds = ((states, take_rows(self.cond, rows)) for states, rows in parts)
        return torch.cat([rate(states, self.sigmas[k], cond) for states, cond in conds])

    def score_completions(
        self, how: Completion, x: Tensor, v: Tensor, k: int
    ) -> Float[Tensor, "m"]:
        """Return the rewards of the completed states k; v are their velocities."""
        for here, there in pairwise(how.path(k, len(self.sigmas) - 1)):
            direction = v if here == k else self.velocity(x, here)
            x = x + (self.sigmas[there] - self.sigmas[here]) * direction
        return self.score_states(x)

    def _rows(self, x: Float[Tensor, "m *latent"]) -> Int[Tensor, "m"]:
        """Return the conditioning row of each state."""
        return self.row.repeat_interleave(len(x) // len(self.row)).to(x.device)

    def score_states(self, x: Float[Tensor, "m *latent"]) -> Float[Tensor, "m"]:
        """Return the rewards of clean latents."""
        each = len(x) // len(self.requests)
        return self.score(x, [request for request in self.requests for _ in range(each)])

    def best(self, value: Float[Tensor, "m"], keep: int | None = None) -> Int[Tensor, "k"]:
        """Return the rows of the best states of each request; ties go to the first state."""
        table = value.unflatten(0, (len(self.requests), -1))
        # A stable sort gives the same tree on every machine if values are equal.
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
        """Return the next states, with `branches` children of each state."""
        eta = self.cfg.eta if branches > 1 else 0.0
        x, v = x.repeat_interleave(branches, 0), v.repeat_interleave(branches, 0)
        level = torch.full((len(x),), eta, device=x.device, dtype=torch.float32)
        to = transition(self.cfg.kernel, x, v, self.sigmas, k, level)
        if branches == 1:
            return to.mean
        shape = (len(x) // len(generators), *x.shape[1:])
        noise = torch.cat(
            [torch.randn(shape, generator=one, dtype=torch.float32) for one in generators]
        )
        return sample_next(to, noise.to(x.device))
