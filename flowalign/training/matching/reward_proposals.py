"""Propose moves of samples along the reward gradient, and keep those that are worth their length.

samples -> rewards and gradients -> cap -> proposals -> accepted moves -> states at low noise
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from flowalign.distributed.processes import Processes
from flowalign.losses.matching import mend
from flowalign.rewards.composite import Rewards
from flowalign.rewards.latent_gradient import score_latents
from flowalign.training.matching.reward_ascent import (
    Mover,
    Moves,
    differentiate,
    predict_clean,
    with_states,
)
from flowalign.types import Batch, Policy, Request, Trajectory
from flowalign.types.ranges import NonNegativeFloat, PositiveFloat, UnitInterval


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
    def open(self, processes: Processes) -> "Proposer":
        return Proposer(self, processes)


class Proposer(Mover):
    """Proposals of a run, with the lowest cap and the price that adapt from step to step."""

    def __init__(self, cfg: RewardProposals, processes: Processes):
        self.cfg, self.processes = cfg, processes
        self.price, self.floor = cfg.price, torch.nan
        """Price of moves, and lowest cap; NaN before the first step."""

    @override
    def state(self) -> dict[str, float]:
        return {"price": self.price, "floor": self.floor}

    @override
    def restore(self, state: Mapping[str, float]) -> None:
        self.price, self.floor = state["price"], state["floor"]

    @override
    def move(
        self,
        policy: Policy,
        rewards: Rewards,
        trajectory: Trajectory,
        examples: Batch,
        samples: Int[Tensor, "n"],
    ) -> tuple[Batch, Trajectory, dict[str, float]]:
        cfg, rewards = self.cfg, rewards.weighted()
        x = trajectory.state(trajectory.num_steps, samples)
        asked = [trajectory.requests[i] for i in samples.tolist()]
        reward, gradient = self._gradients(policy, rewards, asked, x)
        self.floor = mend.raise_floor(self.floor, self.processes.gather(reward))
        cap = mend.reward_cap(reward, examples["group"].to(x.device), cfg.quantile, self.floor)
        low, move = (reward < cap).nonzero()[:, 0], torch.zeros_like(x)
        for rows in low.split(cfg.micro_batch) if len(low) else ():
            some = [asked[i] for i in rows.tolist()]
            moves = mend.propose(gradient[rows], cfg.lengths)
            reached = [self._score(policy, rewards, some, x[rows] + d) for d in moves]
            move[rows] = mend.accept_moves(moves, reached, reward[rows], cap[rows], self.price)
        moved = move.flatten(1).any(1).cpu()
        count = {"rows": float(len(x)), "proposed": float(len(low)), "moved": float(moved.sum())}
        total = self.processes.sum_by_name(count)
        log = {f"moves/{name}": value for name, value in (total | self.state()).items()}
        self.price = mend.adapt_price(self.price, total["moved"], total["proposed"])
        found, states = predict_clean(policy, trajectory, examples, samples, cfg)
        moves, stays = (max(n, 1.0) for n in (total["moved"], total["rows"] - total["moved"]))
        # The mean over all rows is then mean(moved) + keep * mean(others).
        weight = torch.where(moved, 1 / moves, cfg.keep / stays) * total["rows"]
        found = found.with_columns(ascent=move, weight=weight)
        return found, with_states(trajectory, states, samples), log

    def _gradients(
        self, policy: Policy, rewards: Rewards, asked: list[Request], x: Tensor
    ) -> tuple[Float[Tensor, "n"], Float[Tensor, "n *latent"]]:
        """Return the weighted rewards of the samples, NaN if one failed, and their gradients."""
        reward, gradient = x.new_full((len(x),), torch.nan), torch.zeros_like(x)
        for rows in torch.arange(len(x)).split(self.cfg.micro_batch) if len(x) else ():
            found = differentiate(policy, rewards, x[rows], [asked[i] for i in rows.tolist()])
            reward[rows], gradient[rows] = found.total.to(reward), -found.gradient
        return reward, gradient

    @torch.no_grad()
    def _score(self, policy: Policy, rewards: Rewards, asked: list[Request], x: Tensor) -> Tensor:
        """Return the weighted rewards of moved samples; NaN if a reward failed."""
        output, total = score_latents(policy, rewards, rewards.score_with_gradient, x, asked)
        return torch.where(rewards.usable(output.valid), total, torch.nan).float().to(x.device)
