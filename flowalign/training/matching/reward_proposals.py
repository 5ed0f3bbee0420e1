"""Propose moves of samples along the reward gradient, and keep those that are worth their length.

samples -> rewards and gradients -> cap -> proposals -> accepted moves -> states at low noise
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from flowalign.distributed.processes import Processes
from flowalign.losses.matching.mend import (
    accept_moves,
    adapt_price,
    propose,
    raise_floor,
    reward_cap,
)
from flowalign.losses.reward_gradient import Maximise
from flowalign.rewards.composite import Rewards
from flowalign.training.latent_gradient import latent_gradient
from flowalign.training.matching.reward_ascent import Mover, Moves, predict_clean, with_states
from flowalign.types import Batch, Policy, Request, Trajectory
from flowalign.types.ranges import NonNegativeFloat, PositiveFloat, PositiveInt, require_ranges


@dataclass(frozen=True, kw_only=True)
class RewardProposals(Moves):
    """Moves of finished samples along the weighted reward, for `MEND`.

    Source: MEND, arXiv:2610.05954, and its code. A sample whose reward is below a cap gets one move
    of each length. The best one is taken if its capped gain exceeds its price. The policy is then
    fitted to the moved clean prediction at one state of the rollout at low noise.
    """

    lengths: Sequence[PositiveFloat] = (0.1, 0.2, 0.4)
    """Root mean squares of the proposed moves, in units of the latents."""
    quantile: NonNegativeFloat = 0.75
    """Quantile of the rewards of a prompt's group that caps the rewards, at most 1."""
    price: PositiveFloat = 0.1
    """First value of tau: a move of length l costs l^2 / (2 tau). It adapts to the share of
    accepted moves."""
    keep: NonNegativeFloat = 10.0
    """Weight of all samples that stay, relative to all that move."""
    micro_batch: PositiveInt = 8
    """Number of samples per decode and reward call."""

    key = "recipe.data.proposals"

    def __post_init__(self) -> None:
        """Reject settings outside their ranges, and pure noise as the query."""
        require_ranges(self, self.key)
        super().__post_init__()
        if self.quantile > 1 or not self.lengths:
            raise ValueError(
                f"{self.key}.quantile is {self.quantile} and lengths {list(self.lengths)}: choose "
                "a quantile in [0, 1], and at least one length"
            )

    @property
    @override
    def gradients(self) -> int:
        return 1

    @property
    @override
    def proposals(self) -> int:
        return len(self.lengths)

    @override
    def open(self, processes: Processes) -> "Proposer":
        return Proposer(self, processes)


class Proposer(Mover):
    """Proposals of a run, with the lowest cap and the price that adapt from step to step."""

    def __init__(self, cfg: RewardProposals, processes: Processes):
        self.cfg, self.processes = cfg, processes
        self.price, self.floor = cfg.price, None
        """Price of moves, and lowest cap; None before the first step."""

    @override
    def state(self) -> dict[str, Any]:
        return {"price": self.price, "floor": self.floor}

    @override
    def restore(self, state: Mapping[str, Any]) -> None:
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
        cfg, weighted = self.cfg, rewards.weighted()
        x = trajectory.state(trajectory.num_steps, samples)
        asked = [trajectory.requests[i] for i in samples.tolist()]
        reward, gradient = self._gradients(policy, weighted, x, asked)
        known = self.processes.gather(reward[reward.isfinite()])
        self.floor = raise_floor(self.floor, known) if len(known) else self.floor
        floor = -math.inf if self.floor is None else self.floor
        cap = reward_cap(reward, examples["group"].to(x.device), cfg.quantile, floor)
        low, move = (reward < cap).nonzero()[:, 0], torch.zeros_like(x)
        for rows in low.split(cfg.micro_batch) if len(low) else ():
            requests = [asked[i] for i in rows.tolist()]
            moves = propose(gradient[rows], cfg.lengths)
            reached = [self._score(policy, weighted, x[rows] + d, requests) for d in moves]
            move[rows] = accept_moves(moves, reached, reward[rows], cap[rows], self.price)
        moved = move.flatten(1).any(1).cpu()
        total = self.processes.sum_by_name(
            {"rows": float(len(x)), "proposed": float(len(low)), "moved": float(moved.sum())}
        )
        metrics = {f"moves/{name}": total[name] for name in ("proposed", "moved")}
        metrics |= {"moves/price": self.price, "moves/floor": floor}
        self.price = adapt_price(self.price, total["moved"], total["proposed"])
        found, states = predict_clean(policy, trajectory, examples, samples, cfg)
        found = found.with_columns(ascent=move, weight=_weights(moved, total, cfg.keep))
        return found, with_states(trajectory, states, samples), metrics

    def _gradients(
        self, policy: Policy, rewards: Rewards, x: Float[Tensor, "n *latent"], asked: list[Request]
    ) -> tuple[Float[Tensor, "n"], Float[Tensor, "n *latent"]]:
        """Return the weighted rewards of the samples, NaN if one failed, and their gradients."""
        reward, gradient = x.new_full((len(x),), torch.nan), torch.zeros_like(x)
        for rows in torch.arange(len(x)).split(self.cfg.micro_batch) if len(x) else ():
            requests = [asked[i] for i in rows.tolist()]
            found = latent_gradient(
                policy, rewards, rewards.score_with_gradient, Maximise(), x[rows], requests
            )
            if rewards.on_failure == "raise":
                rewards.require(found.output, lambda i, r=requests: f"prompt {r[i].prompt!r}")
            reward[rows], gradient[rows] = found.total.to(reward), -found.gradient
        return reward, gradient

    @torch.no_grad()
    def _score(
        self,
        policy: Policy,
        rewards: Rewards,
        latents: Float[Tensor, "n *latent"],
        requests: Sequence[Request],
    ) -> Float[Tensor, "n"]:
        """Return the weighted rewards of moved samples; NaN if a reward failed."""
        assert policy.renderer, "a recipe refuses policies that cannot render"
        media = policy.renderer.render(latents, None)
        rewards.costs.decodes += len(media)
        fps = policy.fps if media.shape[1] > 1 else None
        output = rewards.score_with_gradient(rewards.batch(media, requests, fps=fps))
        total = (output.values.nan_to_num() * rewards.weights).sum(1)
        return (
            torch.where(rewards.usable(output.valid), total, torch.nan).float().to(latents.device)
        )


def _weights(moved: Tensor, total: Mapping[str, float], keep: float) -> Float[Tensor, "n"]:
    """Return weights with which the mean over all rows is mean(moved) + keep * mean(others)."""
    others = max(total["rows"] - total["moved"], 1.0)
    moving = total["rows"] / max(total["moved"], 1.0)
    return torch.where(moved, moving, keep * total["rows"] / others)
