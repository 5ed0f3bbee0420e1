"""Sample and score groups at each step, and compute the advantages within groups."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import override

from flowalign.functional.agreement import spearman
from flowalign.functional.pairing import estimate_unsampled
from flowalign.functional.resizing import average_on_grid, normalise_mean
from flowalign.losses.matching.advantages import pair_contrast
from flowalign.sampling.inference import encode_once
from flowalign.sampling.rollout import empty_trajectory
from flowalign.training.matching.reward_moves import Moves, with_states
from flowalign.training.matching.source import CreditedStream, StepAdvantages, StepExamples
from flowalign.training.rollouts.advantages import AdvantageEstimate, GatheredCredit, RewardMap
from flowalign.training.rollouts.collecting import collect_rollouts
from flowalign.training.rollouts.rollout_settings import RolloutSettings
from flowalign.training.rollouts.state_values import CompletionValues
from flowalign.types import Batch, Cond, Request, Trajectory
from flowalign.types.trajectory import Completion, take_rows

CompletedStates = Callable[[Sequence[int]], Mapping[int, int]]
"""Function from trained steps to the completed states that their credit is computed from."""


class ScoutedValues(CompletionValues):
    """Final rewards of the chosen candidates, and estimates from previews of the other ones."""

    def __init__(self, outcome: Float[Tensor, "B R"], *setting: Any):
        super().__init__(*setting)
        self.outcome = outcome

    @classmethod
    def merge(
        cls,
        cfg: RolloutSettings,
        scouts: CompletionValues,
        drawn: CompletionValues,
        picked: Int[Tensor, "P K"],
        rows: Int[Tensor, "n"],
    ) -> "ScoutedValues":
        """Return the values of previews in which the samples `rows` are replaced by `drawn`."""
        seen, made = scouts.trajectory, drawn.trajectory
        end = made.num_steps
        latents = seen.state(seen.num_steps)
        latents[rows.to(latents.device)] = made.state(end)
        whole = empty_trajectory(cfg.sampling, (), seen.requests[:: seen.group_size], made.sigmas)
        whole = replace(whole, cond=made.cond, states={end: latents})
        final, known = drawn([end])[:, 0], scouts([seen.num_steps])[:, 0]
        split = known.unflatten(0, (len(picked), -1)), final.unflatten(0, picked.shape)
        outcome = estimate_unsampled(*split, picked).flatten(0, 1)
        setting = scouts.policy, scouts.rewards, whole, lambda _: {}, cfg.completion
        return cls(outcome, *setting, cfg.sampling.micro_batch)

    @override
    def __call__(self, ks: Sequence[int], how: Completion | None = None) -> Tensor:
        """Return the rewards of finished samples, the only states that have any."""
        return self.outcome[:, None].expand(-1, len(ks), -1)


@dataclass(eq=False)
class ScoredStream(CreditedStream):
    """Stream of scored groups, sampled at each step with the policy's or an average's weights.

    Samples that are masked out of training, because a reward failed or other samples were selected,
    are dropped.
    """

    weights: str
    """Weights for sampling: policy, or the name of an average."""
    completed: CompletedStates | None = None
    """Completed state of each trained step, noised instead of the sample. None: the sample."""
    weight_map: str | None = None
    """Name of a reward model with a map that weights each sample's error. None: equal weights."""
    moves: Moves | None = None
    """Moves of latents along the reward gradient; clean predictions replace the samples. None:
    none."""
    spatial: RewardMap | None = None
    """Distribution of advantages over latent positions. None: equal advantages."""
    contrast: bool = False
    """Whether the examples are visited states with the direction from the other sample."""
    modalities: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Reward dimensions of each part of the states. Empty: one advantage."""
    memory: dict[str, float] = field(default_factory=dict)
    """State of the moves, kept from step to step."""

    @override
    def batch(self, step: int) -> StepExamples:
        requests = self.requests.batch(step, self.cfg.prompts_per_step)
        with self._sampling_weights():
            values, estimate, found = self._collect(requests, step)
        chosen, local = estimate.train_mask, estimate.gathered.local
        metrics = {**estimate.metrics, **estimate.size_metrics, **found}
        metrics["samples_dropped"] = float((~chosen.any(1)).sum())
        metrics |= self.rollouts.learn(requests, values, estimate)
        kept = chosen[local].any(1).nonzero()[:, 0]
        examples = self._examples(values, kept, len(requests))
        first, total = int(chosen[: local.start].any(1).sum()), int(chosen.any(1).sum())
        own = estimate.advantage[local]
        advantage, trained = own[kept], chosen[local][kept]
        places = self.spatial(own, values) if self.spatial and self.spatial.blend else None
        places = None if places is None else places[kept]
        if self.cfg.credit is None:
            outcome = advantage[:, 0]
            columns = {"advantage": outcome, "desirable": outcome > 0}
            columns |= {} if places is None else {"places": places[:, 0]}
            columns |= self._route(estimate.gathered, local, kept) if self.modalities else {}
            examples = examples.with_columns(**columns)
            examples, visited, found = self._visit(values.trajectory, examples, kept)
            metrics |= found
            return StepExamples(examples, first, total, metrics, visited=visited)
        steps = self._step_advantages(values.trajectory, kept, advantage, trained)
        steps = replace(steps, places=places)
        return StepExamples(examples, first, total, metrics, steps)

    def _collect(
        self, requests: Sequence[Request], step: int
    ) -> tuple[CompletionValues, AdvantageEstimate, dict[str, float]]:
        """Return the values of the samples, their advantages, and metrics of previews.

        With previews, samples that were not chosen keep the latents of their previews.
        """
        if self.cfg.scout_steps is None:
            values = self.rollouts.sample(requests, step)
            return values, self.rollouts.estimate(values), {}
        previews, chosen = self.cfg.phases
        task = self.learner, self.rewards, requests, self.rollouts.seed, step
        scouts = collect_rollouts(previews, *task)
        found = self.rollouts.estimate(scouts)
        size, count = previews.sampling.samples_per_prompt, chosen.sampling.samples_per_prompt
        mask = found.train_mask[found.gathered.local, 0]
        # Where failed rewards leave fewer, further samples fill up the group and are not trained.
        order = mask.view(-1, size).float().argsort(dim=1, descending=True, stable=True)
        picked = order[:, :count].sort(1).values
        rows = (picked + size * torch.arange(len(picked))[:, None]).flatten()
        drawn = collect_rollouts(chosen, *task, start=scouts.trajectory.state(0, rows))
        values = ScoutedValues.merge(self.cfg, scouts, drawn, picked, rows)
        weights = self.rewards.weights
        compared = (
            (v([v.trajectory.num_steps])[:, 0] @ weights).view(len(picked), -1)
            for v in (scouts, drawn)
        )
        first, last = compared
        each = [spearman(*pair) for pair in zip(first.gather(1, picked), last, strict=True)]
        correlation = self.learner.processes.gather(torch.tensor(each)).nanmean()
        estimate = self.rollouts.estimate(values, chosen=mask)
        return values, estimate, {"scouts/rank_correlation": float(correlation)}

    @override
    def state(self) -> dict[str, Any]:
        return {**super().state(), "moves": self.memory}

    @override
    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.memory = dict(state["moves"])

    def _route(
        self, gathered: GatheredCredit, local: slice, kept: Int[Tensor, "n"]
    ) -> dict[str, dict[str, Float[Tensor, "n"]]]:
        """Return the advantages of the kept samples by the rewards of each part."""
        compare = self.rollouts.estimator.compare_dims
        found = {part: compare(gathered, dims) for part, dims in self.modalities.items()}
        return {"modality_advantage": {n: each[local][kept, 0] for n, each in found.items()}}

    def _visit(
        self, trajectory: Trajectory, examples: Batch, kept: Int[Tensor, "n"]
    ) -> tuple[Batch, Trajectory | None, dict[str, float]]:
        """Return the kept samples with their directions or targets, the states to match, and
        metrics."""
        if self.contrast:
            direction = pair_contrast(trajectory.state(trajectory.num_steps))[kept]
            states = {k: trajectory.state(k, kept) for k in range(trajectory.num_steps + 1)}
            examples = examples.with_columns(contrast=direction)
            return examples, with_states(trajectory, states, kept), {}
        if self.moves is None:
            return examples, None, {}
        with self._sampling_weights():
            return self.moves.move(
                self.learner, self.rewards, trajectory, examples, kept, self.memory
            )

    def _sampling_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the policy has the sampling weights."""
        if self.weights == "policy":
            return nullcontext()
        return self.learner.averaged(self.weights)

    def _examples(
        self, values: CompletionValues, kept: Int[Tensor, "n"], num_requests: int
    ) -> Batch:
        """Return the kept samples with conditioning, groups and rewards."""
        trajectory, dims = values.trajectory, self.rewards.dims
        latents = trajectory.state(trajectory.num_steps, kept)
        prompt = trajectory.prompt[kept]
        places = torch.tensor(list(self.learner.processes.share(range(num_requests))))
        scores = values([trajectory.num_steps])[kept, 0]
        rows = Batch(
            {
                "latents": latents,
                "cond": self._cond(trajectory, kept, scores),
                "weight": torch.ones(len(kept)),
                "scores": dict(zip(dims, scores.unbind(1), strict=True)),
                "group": places[prompt],
            }
        )
        if self.weight_map is None:
            return rows
        maps = values.outcome_map(self.weight_map)[kept]
        maps = normalise_mean(average_on_grid(maps, tuple(latents.shape[2:])))
        return rows.with_columns(weight_map=maps.to(latents.device))

    def _cond(
        self, trajectory: Trajectory, kept: Int[Tensor, "n"], scores: Float[Tensor, "n R"]
    ) -> Cond:
        """Return the training conditioning of the kept samples, which may depend on scores."""
        asked = [trajectory.requests[i] for i in kept.tolist()]
        conditioning, dims, learned = self.requests.conditioning, self.rewards.dims, asked
        if conditioning:
            known = (dict(zip(dims, row, strict=True)) for row in scores.tolist())
            learned = [conditioning.for_training(*each) for each in zip(asked, known, strict=True)]
        if [r.input_digest for r in learned] == [r.input_digest for r in asked]:
            return take_rows(trajectory.cond, trajectory.prompt[kept].to(trajectory.device))
        cond, row = encode_once(self.learner.policy, learned)
        return take_rows(cond, row.to(trajectory.device))

    def _step_advantages(
        self,
        trajectory: Trajectory,
        kept: Int[Tensor, "n"],
        advantage: Float[Tensor, "n T"],
        trained: Bool[Tensor, "n T"],
    ) -> StepAdvantages:
        """Return the step advantages of the kept samples, with the completed latents."""
        steps = trajectory.trained.any(0).nonzero()[:, 0].tolist()
        states = self.completed(steps) if self.completed else {}
        completed = {k: _completion(trajectory, j, self.cfg)[kept] for k, j in states.items()}
        return StepAdvantages(trajectory.sigmas.cpu(), advantage, trained, completed)


def _completion(trajectory: Trajectory, k: int, cfg: RolloutSettings) -> Float[Tensor, "B *latent"]:
    """Return the completion of state k of every sample, on the CPU."""
    if k == trajectory.num_steps:
        return trajectory.state(k).cpu()
    return trajectory.rows.expand(trajectory.finished[k, cfg.completion].cpu(), k)
