"""Move samples or clean predictions of a rollout along the reward gradient.

rollout -> state at a low noise level -> clean prediction -> ascent and descent of the reward
samples -> rewards and gradients -> cap -> proposals -> accepted moves -> states at low noise
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from flowalign.functional.reward_ascent import ascend_and_descend
from flowalign.functional.transition import per_row
from flowalign.losses.matching import mend
from flowalign.losses.reward_gradient import Maximise
from flowalign.rewards.composite import Rewards
from flowalign.rewards.latent_gradient import LatentGradient, latent_gradient, score_latents
from flowalign.training.learner import Learner
from flowalign.training.recipe import RecipePlan
from flowalign.training.reference import conditional
from flowalign.types import Batch, Policy, Request, SharedRows, Trajectory
from flowalign.utils.ranges import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
    require_ranges,
)


@dataclass(frozen=True, kw_only=True)
class Moves(ABC):
    """Moves of latents along the reward gradient, matched at one state of the rollout."""

    key: ClassVar[str]
    """Key of the settings in a run file."""

    query: NonNegativeInt
    """Index of the denoising step that starts at the query state, at least 1."""
    micro_batch: PositiveInt = 8
    """Number of samples per decode and reward call."""

    def __post_init__(self) -> None:
        """Reject settings outside their ranges, and pure noise as the query."""
        require_ranges(self, self.key)
        if self.query < 1:
            raise ValueError(
                f"{self.key}.query is 0, which is pure noise: choose a late denoising step, such "
                "as the one that starts near noise level 0.28"
            )

    def check_query(self, made: Set[int], key: str) -> None:
        """Raise ValueError unless the query is one of the denoising steps that `key` makes."""
        if self.query not in made:
            raise ValueError(
                f"{self.key}.query is {self.query}, which is not among the denoising steps that "
                f"{key}.sampling makes, {sorted(made)}: choose one of them, or another num_steps "
                "or tail_ratio"
            )

    @property
    @abstractmethod
    def scores(self) -> tuple[int, int]:
        """Return the numbers per sample of reward gradients, and of other scores, at most."""

    def extend_plan(self, plan: RecipePlan, examples: int, rewards: Rewards) -> RecipePlan:
        """Add the cost of the moves of `examples` samples."""
        gradients, proposals = (examples * each for each in self.scores)
        scored, models = gradients + proposals, len(rewards.weighted().models)
        rows = {"reward gradients per step": f"{gradients}"}
        rows |= {"proposed moves per step": f"at most {proposals}"} if proposals else {}
        work = replace(
            plan.work.plus({"clean predictions": examples}),
            decodes=plan.work.decodes + scored,
            reward_calls=plan.work.reward_calls + scored * models,
            differentiates_rewards=True,
            bounds={"decodes"} if proposals else frozenset(),
        )
        return replace(plan, rows={**plan.rows, **rows}, work=work)

    @abstractmethod
    def move(
        self,
        learner: Learner,
        rewards: Rewards,
        trajectory: Trajectory,
        examples: Batch,
        samples: Int[Tensor, "n"],
        memory: MutableMapping[str, float],
    ) -> tuple[Batch, Trajectory, dict[str, float]]:
        """Return the examples of `samples` with their targets, the queried states, and metrics.

        The clean latents of the examples become the clean predictions of the current weights.
        `memory` is kept from step to step.
        """

    def parts(self, count: int) -> Iterator[slice]:
        """Yield the micro-batches of `count` samples."""
        starts = range(0, count, self.micro_batch)
        return (slice(start, start + self.micro_batch) for start in starts)

    def predict_clean(
        self, policy: Policy, trajectory: Trajectory, examples: Batch, samples: Int[Tensor, "n"]
    ) -> tuple[Batch, Trajectory]:
        """Return the examples with their clean predictions, and the states at query and end."""
        sigma = trajectory.sigmas[self.query].to(trajectory.device)
        x = trajectory.state(self.query, samples)
        clean = torch.empty_like(x)
        for rows in self.parts(len(x)):
            cond = {name: value[rows] for name, value in examples["cond"].items()}
            level = sigma.expand(len(x[rows]))
            with torch.no_grad():
                v = conditional(policy).velocity(x[rows], level, cond)
            clean[rows] = x[rows] - per_row(level, v) * v
        states = {self.query: x, trajectory.num_steps: clean}
        return examples.with_columns(latents=clean), with_states(trajectory, states, samples)


@dataclass(frozen=True, kw_only=True)
class RewardAscent(Moves):
    """Ascent and descent of the weighted reward from one clean prediction per sample.

    Source: DiffusionOPSD, arXiv:2608.24646, and its code. Each sample gives one query state of its
    rollout, at a noise level of about 0.28. It costs one evaluation, one decode and reward, and
    2 * steps - 1 reward gradients.
    """

    key = "recipe.data.ascent"

    steps: PositiveInt = 2
    """Number M of steps in each direction."""
    radius: PositiveFloat = 0.1
    """Radius of the ball around a clean prediction, in units of its norm."""
    share: PositiveFloat = 1.0
    """Length of all steps together, in units of the radius."""

    @property
    @override
    def scores(self) -> tuple[int, int]:
        return 2 * self.steps - 1, 0

    @override
    def move(
        self,
        learner: Learner,
        rewards: Rewards,
        trajectory: Trajectory,
        examples: Batch,
        samples: Int[Tensor, "n"],
        memory: MutableMapping[str, float],
    ) -> tuple[Batch, Trajectory, dict[str, float]]:
        found, visited = self.predict_clean(learner.policy, trajectory, examples, samples)
        clean, weighted = found["latents"], rewards.weighted()
        up, down = torch.empty_like(clean), torch.empty_like(clean)
        where = ", the reward gradient of a clean prediction"
        for rows in self.parts(len(clean)):
            asked = visited.requests[rows]

            def gradient(latents: Tensor, asked: Sequence[Request] = asked) -> Tensor:
                return -differentiate(learner.policy, weighted, latents, asked, where).gradient

            up[rows], down[rows] = ascend_and_descend(
                clean[rows], gradient, self.steps, self.radius, self.share
            )
        return found.with_columns(ascent=up, descent=down), visited, {}


@dataclass(frozen=True, kw_only=True)
class RewardProposals(Moves):
    """Moves of finished samples along the weighted reward, for `MEND`.

    Source: MEND, arXiv:2610.05954, and its code. A sample whose reward is below a cap gets one move
    of each length. The best one is taken if its capped gain exceeds its price. The policy is then
    fitted to the moved clean prediction at one state of the rollout at low noise.
    """

    key = "recipe.data.proposals"

    lengths: Sequence[PositiveFloat] = (0.1, 0.2, 0.4)
    """Root mean squares of the proposed moves, in units of the latents."""
    quantile: UnitInterval = 0.75
    """Quantile of the rewards of a prompt's group that caps the rewards."""
    price: PositiveFloat = 0.1
    """First value of tau: a move of length l costs l^2 / (2 tau). It adapts to the share of
    accepted moves."""
    keep: NonNegativeFloat = 10.0
    """Weight of all samples that stay, relative to all that move."""

    @property
    @override
    def scores(self) -> tuple[int, int]:
        return 1, len(self.lengths)

    def __post_init__(self) -> None:
        """Reject settings outside their ranges, pure noise as the query, and no lengths."""
        super().__post_init__()
        if not self.lengths:
            raise ValueError(f"{self.key}.lengths is empty: give at least one, such as 0.2")

    @override
    def move(
        self,
        learner: Learner,
        rewards: Rewards,
        trajectory: Trajectory,
        examples: Batch,
        samples: Int[Tensor, "n"],
        memory: MutableMapping[str, float],
    ) -> tuple[Batch, Trajectory, dict[str, float]]:
        """Move samples; the lowest cap and the price of moves adapt from step to step."""
        policy, processes, rewards = learner.policy, learner.processes, rewards.weighted()
        x = trajectory.state(trajectory.num_steps, samples)
        asked = [trajectory.requests[i] for i in samples.tolist()]
        reward, gradient = self._gradients(policy, rewards, asked, x)
        price = memory.get("price", self.price)
        floor = mend.raise_floor(memory.get("floor", torch.nan), processes.gather(reward))
        cap = mend.reward_cap(reward, examples["group"].to(x.device), self.quantile, floor)
        low, move = (reward < cap).nonzero()[:, 0], torch.zeros_like(x)
        for part in self.parts(len(low)):
            rows = low[part]
            some = [asked[i] for i in rows.tolist()]
            moves = mend.propose(gradient[rows], self.lengths)
            reached = [_score(policy, rewards, some, x[rows] + d) for d in moves]
            move[rows] = mend.accept_moves(moves, reached, reward[rows], cap[rows], price)
        moved = move.flatten(1).any(1).cpu()
        count = {"rows": float(len(x)), "proposed": float(len(low)), "moved": float(moved.sum())}
        total = processes.sum_by_name(count)
        log = {f"moves/{n}": v for n, v in (total | {"price": price, "floor": floor}).items()}
        memory["price"] = mend.adapt_price(price, total["moved"], total["proposed"])
        memory["floor"] = floor
        found, visited = self.predict_clean(policy, trajectory, examples, samples)
        moves, stays = (max(n, 1.0) for n in (total["moved"], total["rows"] - total["moved"]))
        # The mean over all rows is then mean(moved) + keep * mean(others).
        weight = torch.where(moved, 1 / moves, self.keep / stays) * total["rows"]
        return found.with_columns(ascent=move, weight=weight), visited, log

    def _gradients(
        self, policy: Policy, rewards: Rewards, asked: list[Request], x: Tensor
    ) -> tuple[Float[Tensor, "n"], Float[Tensor, "n *latent"]]:
        """Return the weighted rewards of the samples, NaN if one failed, and their gradients."""
        reward, gradient = x.new_full((len(x),), torch.nan), torch.zeros_like(x)
        for rows in self.parts(len(x)):
            found = differentiate(policy, rewards, x[rows], asked[rows])
            reward[rows], gradient[rows] = found.total.to(reward), -found.gradient
        return reward, gradient


@torch.no_grad()
def _score(policy: Policy, rewards: Rewards, asked: list[Request], x: Tensor) -> Tensor:
    """Return the weighted rewards of moved samples; NaN if a reward failed."""
    output, total = score_latents(policy, rewards, rewards.score_with_gradient, x, asked)
    return torch.where(rewards.usable(output.valid), total, torch.nan).float().to(x.device)


def differentiate(
    policy: Policy,
    rewards: Rewards,
    latents: Float[Tensor, "n *latent"],
    requests: Sequence[Request],
    where: str = "",
) -> LatentGradient:
    """Return the weighted rewards of latents, and the gradient of their negative sum.

    Raises:
        RewardFailure: A reward failed, and `on_failure` is raise; `where` ends the message.
    """
    score = rewards.score_with_gradient
    found = latent_gradient(policy, rewards, score, Maximise(), latents, requests)
    if rewards.on_failure == "raise":
        rewards.require(found.output, lambda i: f"prompt {requests[i].prompt!r}{where}")
    return found


def with_states(
    trajectory: Trajectory,
    states: Mapping[int, Float[Tensor, "n *latent"]],
    samples: Int[Tensor, "n"],
) -> Trajectory:
    """Return trajectories with only these states, one row per sample in `samples`."""
    each = torch.arange(len(samples))[:, None].expand(-1, trajectory.num_steps + 1)
    return replace(
        trajectory,
        logp=trajectory.logp[samples.to(trajectory.logp.device)],
        eta=trajectory.eta[samples.to(trajectory.eta.device)],
        states=states,
        requests=[trajectory.requests[int(i)] for i in samples],
        rows=SharedRows(each.contiguous()),
        means={},
        finished={},
        hidden={},
    )
