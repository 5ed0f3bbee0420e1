"""Steer sampling with the rewards of a run file, without training: RewardSDS or a search."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowalign.rewards.checked import RewardFailure
from flowalign.rewards.composite import Rewards
from flowalign.sampling.reward_sds import RewardSDS, Score, optimise
from flowalign.sampling.search import Search, search
from flowalign.training.rollouts.latent_values import check_latent_dims
from flowalign.types import Cond, LatentReward, Policy, Request


@dataclass
class Steering:
    """Optimisation of latents, or a search among them, that replaces plain sampling."""

    cfg: RewardSDS | Search
    """Settings of the optimisation or of the search."""
    rewards: Rewards
    """Weighted rewards, which count their calls and the decodes that they need."""
    settings: Mapping[str, Any]
    """`cfg` as JSON, for the manifest of an output folder."""
    rated: int = 0
    """Number of noisy latents that a latent reward has scored so far."""

    @property
    def name(self) -> str:
        """Return the name of the steering method, as in a manifest."""
        return "search" if isinstance(self.cfg, Search) else "reward_sds"

    def check(self) -> None:
        """Raise ValueError if a latent reward lacks a dimension that has a weight."""
        if isinstance(self.cfg, Search) and isinstance(self.cfg.value, LatentReward):
            check_latent_dims(self.rewards, self.cfg.value, "search.value")

    def check_steps(self, num_steps: int) -> None:
        """Raise ValueError if `num_steps` steps do not reach a step at which the search prunes."""
        if isinstance(self.cfg, Search):
            self.cfg.check(num_steps)

    def load(self, policy: Policy) -> None:
        """Load the rewards and attach them to a policy that has its weights."""
        self.rewards.load()
        if isinstance(self.cfg, Search):
            self.rewards.costs.count(policy.denoiser)
            if isinstance(self.cfg.value, LatentReward):
                self.cfg.value.attach(policy)

    def sample(
        self,
        policy: Policy,
        decode: Callable[[Tensor], Tensor],
        requests: Sequence[Request],
        num_steps: int,
        generators: Sequence[torch.Generator],
        micro_batch: int,
    ) -> Tensor:
        """Return one clean latent per request."""
        score, cfg = self.score(decode, policy.fps), self.cfg
        asked = num_steps, generators, micro_batch
        if isinstance(cfg, Search):
            rate = self.rate if isinstance(cfg.value, LatentReward) else None
            return search(policy, score, requests, cfg, *asked, rate=rate)
        return optimise(policy, score, requests, cfg, *asked)

    def score(self, decode: Callable[[Tensor], Tensor], fps: float | None) -> Score:
        """Return the function that computes the weighted reward of latents."""

        def scored(x: Tensor, requests: Sequence[Request]) -> Tensor:
            self.rewards.costs.decodes += len(x)
            return self.total(decode(x), requests, fps)

        return scored

    def total(self, media: Tensor, requests: Sequence[Request], fps: float | None) -> Tensor:
        """Return the weighted reward of each image or video.

        Raises:
            RewardFailure: A reward could not be computed.
        """
        output = self.rewards.score(self.rewards.batch(media, requests, fps=fps))
        if not (usable := self.rewards.usable(output.valid)).all():
            i = int((~usable).nonzero()[0])
            raise RewardFailure(
                f"a sample of {requests[i].prompt!r} has no reward, so it cannot be steered: "
                f"{output.reasons.get(i, 'no reason given')}"
            )
        return (output.values.nan_to_num() * self.rewards.weights).sum(1)

    def rate(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return the weighted score of noisy latents, each at a share of a network evaluation."""
        assert isinstance(self.cfg, Search)
        assert isinstance(self.cfg.value, LatentReward)
        dims, costs = self.cfg.value.dims, self.rewards.costs
        with costs.paused():  # else partial evaluations would count as whole ones
            scores = self.cfg.value.score(x, sigma, cond)
        self.rated += len(x)
        wanted = zip(self.rewards.dims, self.rewards.weights.tolist(), strict=True)
        columns = [scores[:, dims.index(dim)] * weight for dim, weight in wanted if weight]
        return torch.stack(columns).sum(0)

    def plan(self, policy: Policy, num_steps: int, count: int) -> str:
        """Return the planned cost of `count` samples; empty for RewardSDS."""
        if not isinstance(self.cfg, Search):
            return ""
        per_velocity = policy.evaluations_per_velocity
        each = self.cfg.cost(num_steps, per_velocity).samples(num_steps, per_velocity)
        planned = _describe(self._estimate(self.cfg, policy, num_steps, count))
        return f"{count} to search: {planned}; each takes the evaluations of {each:.4g} samples"

    def check_spent(self, policy: Policy, num_steps: int, count: int) -> str:
        """Return the cost that `count` samples have had; empty for RewardSDS.

        Raises:
            RuntimeError: The cost differs from the planned one.
        """
        if not isinstance(self.cfg, Search):
            return ""
        planned = self._estimate(self.cfg, policy, num_steps, count)
        costs = self.rewards.costs
        spent = SearchSpent(
            costs.network_evaluations, costs.decodes, costs.reward_calls, self.rated, planned.share
        )
        if spent != planned:
            raise RuntimeError(f"planned: {_describe(planned)}; spent: {_describe(spent)}")
        return f"; spent as planned: {_describe(spent)}"

    def _estimate(self, cfg: Search, policy: Policy, num_steps: int, count: int) -> "SearchSpent":
        each = cfg.cost(num_steps, policy.evaluations_per_velocity)
        calls = count * each.scored * len(self.rewards.models)
        counts = count * each.evaluations, count * each.scored, calls, count * each.rated
        return SearchSpent(*counts, each.share)


class SearchSpent(NamedTuple):
    """Cost of searches, in counts and as a share per scored noisy latent."""

    evaluations: int
    decodes: int
    reward_calls: int
    rated: int
    share: float


def _describe(spent: SearchSpent) -> str:
    words = (
        f"{spent.evaluations} network evaluations, {spent.decodes} decodes for rewards, "
        f"{spent.reward_calls} reward calls"
    )
    rated = f", {spent.rated} states rated at {spent.share:.0%} of an evaluation each"
    return words + (rated if spent.rated else "")
