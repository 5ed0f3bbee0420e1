"""Steer sampling with the rewards of a run file, without training: RewardSDS or a search."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import yaml
from torch import Tensor

from flowalign.rewards.checked import RewardFailure
from flowalign.rewards.composite import Rewards
from flowalign.runs.config import Run
from flowalign.sampling.reward_sds import RewardSDS, optimise
from flowalign.sampling.search import Search, SearchCost, search
from flowalign.training.rollouts.state_values import check_latent_dims
from flowalign.types import Cond, LatentReward, Policy, Request
from flowalign.utils.typed_settings import load_typed


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

    @property
    def latent_reward(self) -> LatentReward | None:
        """Return the latent reward that values the states of a search, if there is one."""
        value = self.cfg.value if isinstance(self.cfg, Search) else None
        return value if isinstance(value, LatentReward) else None

    def check(self, num_steps: int) -> None:
        """Raise ValueError if a latent reward lacks a weighted dimension, or no step prunes."""
        if self.latent_reward:
            check_latent_dims(self.rewards, self.latent_reward, "search.value")
        if isinstance(self.cfg, Search):
            self.cfg.check(num_steps)

    def load(self, policy: Policy) -> None:
        """Load the rewards and attach them to a policy that has its weights."""
        self.rewards.load()
        if isinstance(self.cfg, Search):
            self.rewards.costs.count(policy.denoiser)
        if self.latent_reward:
            self.latent_reward.attach(policy)

    def sample(
        self,
        policy: Policy,
        decode: Callable[[Tensor], Tensor],
        requests: Sequence[Request],
        num_steps: int,
        generators: Sequence[torch.Generator],
        micro_batch: int,
    ) -> Tensor:
        """Return one clean latent per request.

        Raises:
            RewardFailure: A reward could not be computed.
        """

        def score(x: Tensor, requests: Sequence[Request]) -> Tensor:
            self.rewards.costs.decodes += len(x)
            output = self.rewards.score(self.rewards.batch(decode(x), requests, fps=policy.fps))
            if not (usable := self.rewards.usable(output.valid)).all():
                i = int((~usable).nonzero()[0])
                raise RewardFailure(
                    f"a sample of {requests[i].prompt!r} has no reward, so it cannot be steered: "
                    f"{output.reasons.get(i, 'no reason given')}"
                )
            return (output.values.nan_to_num() * self.rewards.weights).sum(1)

        asked = num_steps, generators, micro_batch
        if isinstance(self.cfg, RewardSDS):
            return optimise(policy, score, requests, self.cfg, *asked)
        rate = self._rate if self.latent_reward else None
        return search(policy, score, requests, self.cfg, *asked, rate=rate)

    def _rate(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return the weighted score of noisy latents, each at a share of a network evaluation."""
        assert self.latent_reward
        dims, costs = self.latent_reward.dims, self.rewards.costs
        with costs.paused():  # else partial evaluations would count as whole ones
            scores = self.latent_reward.score(x, sigma, cond)
        self.rated += len(x)
        wanted = zip(self.rewards.dims, self.rewards.weights.tolist(), strict=True)
        columns = [scores[:, dims.index(dim)] * weight for dim, weight in wanted if weight]
        return torch.stack(columns).sum(0)

    def plan(self, policy: Policy, num_steps: int, count: int) -> str:
        """Return the planned cost of `count` samples; empty for RewardSDS."""
        if not isinstance(self.cfg, Search):
            return ""
        per_velocity = policy.evaluations_per_velocity
        each = self.cfg.cost(num_steps, per_velocity)
        planned, samples = self._describe_plan(each, count), each.samples(num_steps, per_velocity)
        return f"{count} to search: {planned}; each takes the evaluations of {samples:.4g} samples"

    def check_spent(self, policy: Policy, num_steps: int, count: int) -> str:
        """Return the cost that `count` samples have had; empty for RewardSDS.

        Raises:
            RuntimeError: The cost differs from the planned one.
        """
        if not isinstance(self.cfg, Search):
            return ""
        each = self.cfg.cost(num_steps, policy.evaluations_per_velocity)
        planned, costs = self._describe_plan(each, count), self.rewards.costs
        counts = costs.network_evaluations, costs.decodes, costs.reward_calls, self.rated
        spent = _describe(counts, each.share)
        if spent != planned:
            raise RuntimeError(f"planned: {planned}; spent: {spent}")
        return f"; spent as planned: {spent}"

    def _describe_plan(self, each: SearchCost, count: int) -> str:
        calls = each.scored * len(self.rewards.models)
        counts = [count * n for n in (each.evaluations, each.scored, calls, each.rated)]
        return _describe(counts, each.share)


def _describe(counts: Sequence[int], share: float) -> str:
    evaluations, decodes, calls, rated = counts
    words = (
        f"{evaluations} network evaluations, {decodes} decodes for rewards, {calls} reward calls"
    )
    return words + (f", {rated} states rated at {share:.0%} of an evaluation each" if rated else "")


_SETTING_NAMES = {"latent_rate": "learning_rate"}
"""Setting of RewardSDS for each option with another name."""


def build_steering(
    run_file: Run,
    sds_steps: int | None,
    sds_options: Mapping[str, Any],
    best_of: int | None,
    search_file: str | None,
) -> Steering | None:
    """Return the optimisation or search that replaces plain sampling, or None.

    Args:
        run_file: Run that provides the rewards.
        sds_steps: Optimisation steps of RewardSDS; None: no RewardSDS.
        sds_options: Given options of RewardSDS (noises, weighting, latent_rate).
        best_of: Number of candidates per image; the best one is kept. None: no search.
        search_file: YAML file with settings of a tree search, or None.

    Raises:
        ValueError: The run has guidance, which steering would ignore, or no reward has a weight.
    """
    sds = _read_reward_sds(sds_steps, sds_options)
    tree, settings = _read_search(best_of, search_file)
    cfg = sds or tree
    if cfg is None:
        return None
    _check_guidance(run_file, "--reward_sds" if sds else "a search")
    rewards = run_file.build_rewards()
    if isinstance(cfg, Search) or cfg.weighting != "none":
        rewards.check_weights()
    rewards.check_policy(run_file.policy, with_sound=False)
    return Steering(cfg, rewards.weighted(), settings or json.loads(json.dumps(asdict(cfg))))


def _check_guidance(run_file: Run, option: str) -> None:
    """Raise ValueError if the run file has guidance that the steered sampler would ignore."""
    if run_file.evaluation and run_file.evaluation.reward_guidance:
        remedy = f"leave out {option}, or add --evaluation.reward_guidance null"
        raise ValueError(f"evaluation.reward_guidance does not reach {option}: {remedy}")
    if run_file.conditioning and run_file.conditioning.guidance is not None:
        raise ValueError(
            f"the guidance of conditioning {type(run_file.conditioning).__name__} does not reach "
            f"{option}: drop the option, or the conditioning with --conditioning null"
        )


def _read_reward_sds(steps: int | None, options: Mapping[str, Any]) -> RewardSDS | None:
    """Return the settings of RewardSDS."""
    if steps is None:
        return None
    named = {_SETTING_NAMES.get(name, name): value for name, value in options.items()}
    return RewardSDS(steps=steps, **named)


def _read_search(best_of: int | None, file: str | None) -> tuple[Search | None, dict[str, Any]]:
    """Return the search for each image, if there is one, and its settings as JSON values."""
    if best_of:
        return Search(width=best_of), {"width": best_of}
    if file is None:
        return None, {}
    tree, text = load_typed(Search, file)
    return tree, yaml.safe_load(text)
