"""Combine several reward models: concatenate and weight their dimensions, and handle failures."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowalign.rewards.checked import (
    CheckedReward,
    OnFailure,
    RewardFailure,
    check_default_dtype,
    check_spec,
    load,
)
from flowalign.types import (
    MediaBatch,
    Policy,
    Request,
    RewardModel,
    RewardOutput,
    SampleRanks,
    Sound,
    prompts_of,
)
from flowalign.utils.console import say
from flowalign.utils.costs import Costs, stage
from flowalign.utils.errors import require_known


@dataclass
class Rewards:
    """Reward models with concatenated dimensions and their weights."""

    models: Sequence[RewardModel]
    """Reward models, each with one or several dimensions."""
    weight_of: Mapping[str, float]
    """Weight of each dimension; dimensions without a weight are only logged."""
    on_failure: OnFailure = "raise"
    """Reaction to a weighted reward that failed."""
    costs: Costs = field(default_factory=Costs)
    """Counter of decodes and reward calls."""
    log: Callable[[str], None] = say
    """Function that shows a line about a slow reward."""
    ranks: SampleRanks | None = None
    """Ranks that compute the same samples; only the first of them scores. None: every rank scores
    its own samples."""
    dims: tuple[str, ...] = field(init=False)
    """Names of the R dimensions of all models."""
    weights: Float[Tensor, "R"] = field(init=False)
    """Weight of each dimension (default: 0)."""
    workers: dict[int, CheckedReward] = field(default_factory=dict, init=False, repr=False)
    """Each model that was called, with its thread, by the `id()` of the model."""

    def __post_init__(self) -> None:
        """Raise ValueError for weights of unknown dimensions, or dimensions of several models."""
        if not self.models and self.weight_of:
            raise ValueError(f"rewards is empty, but there are weights of {sorted(self.weight_of)}")
        for model in self.models:
            check_spec(model)
        self.dims = tuple(dim for model in self.models for dim in model.spec.dims)
        repeated = sorted({dim for dim in self.dims if self.dims.count(dim) > 1})
        if repeated:
            raise ValueError(f"reward dimensions {repeated} come from more than one model")
        require_known("weights name the unknown reward dimension", self.weight_of, self.dims)
        self.weights = torch.tensor([float(self.weight_of.get(dim, 0.0)) for dim in self.dims])
        if not self.weights.isfinite().all():
            raise ValueError(f"weights of rewards must be finite numbers, got {self.weight_of}")

    def check_weights(self) -> None:
        """Raise ValueError if there are no models, or all weights are 0."""
        if not self.models:
            raise ValueError("rewards is empty; name at least one reward model")
        if not self.weighted_dims:
            raise ValueError(
                "no reward has a weight other than 0: set the weight of one of its dimensions in "
                f"rewards; there are {', '.join(self.dims)}"
            )

    @property
    def weighted_dims(self) -> list[str]:
        """Return the dimensions with a weight other than 0."""
        return [dim for dim in self.dims if self.weight_of.get(dim)]

    def check_policy(self, policy: Policy, with_sound: bool = True) -> None:
        """Raise ValueError if a model needs media that the policy does not give here."""
        gives = {"image"} if policy.fps is None else {"video", "fps"}
        gives |= {"sound"} if policy.sound_decoder and with_sound else set()
        for spec in (model.spec for model in self.models):
            needs = {*spec.needs} & {"fps", "sound"} | ({spec.modality} - {"any"})
            if missing := sorted(needs - gives):
                remedy = ": wrap it in reward_models.PerFrame" if "image" in missing else ""
                raise ValueError(
                    f"reward {spec.name!r} needs {' and '.join(missing)}, and "
                    f"{type(policy).__name__} gives {' and '.join(sorted(gives))} here{remedy}"
                )

    def load(self) -> None:
        """Load every model; raise ValueError for unusable weights or servers."""
        for model in self.models:
            load(model)

    def batch(
        self,
        media: Float[Tensor, "n F 3 H W"],
        requests: Sequence[Request],
        groups: Sequence[int] = (),
        fps: float | None = None,
        sound: Sequence[Sound] = (),
    ) -> MediaBatch:
        """Return media with their requests as a batch; `fps` is None for images."""
        has_metadata = any(request.metadata for request in requests)
        has_references = any(request.references for request in requests)
        masks = [r.mask.read()[0].mean(0, keepdim=True) if r.mask else None for r in requests]
        return MediaBatch(
            media,
            prompts_of(requests),
            [request.metadata for request in requests] if has_metadata else (),
            () if fps is None else (fps,) * len(media),
            [[one.read()[0] for one in r.references] for r in requests] if has_references else (),
            groups,
            masks if any(request.mask for request in requests) else (),
            sound,
        )

    def decode(
        self,
        policy: Policy,
        latents: Float[Tensor, "n *latent"],
        requests: Sequence[Request],
        groups: Sequence[int] = (),
    ) -> MediaBatch:
        """Decode latents to a batch with their requests, with sound if a model needs it."""
        media, sound = policy.decode(latents).cpu(), []
        if any("sound" in model.spec.needs for model in self.models):
            assert policy.sound_decoder, "check_policy refuses policies without sound"
            sound = policy.sound_decoder.decode_sound(latents)
        return self.batch(media, requests, groups, policy.fps, sound)

    def scoring(self) -> "Scoring":
        """Start scoring media that arrive in chunks; every model runs in its own thread."""
        return Scoring(self)

    def score(self, batch: MediaBatch) -> RewardOutput:
        """Return all dimensions of all models, with joined reasons."""
        scoring = self.scoring()
        scoring.add(batch)
        return scoring.result()

    def weighted(self) -> "Rewards":
        """Return only the models with a weighted dimension."""
        chosen = [one for one in self.models if any(map(self.weight_of.get, one.spec.dims))]
        dims = {dim for model in chosen for dim in model.spec.dims}
        kept = {dim: weight for dim, weight in self.weight_of.items() if dim in dims}
        return replace(self, models=chosen, weight_of=kept)

    def score_with_gradient(self, batch: MediaBatch) -> RewardOutput:
        """Return all dimensions, with a gradient to media that require one.

        Raises:
            ValueError: A model is not differentiable.
        """
        self.costs.reward_calls += len(batch) * len(self.models)
        columns = [self.worker(model).score(batch) for model in self.models]
        self.check_default_dtype()
        return join_dimensions(columns)

    def submit(self, model: RewardModel, batch: MediaBatch) -> Future[RewardOutput]:
        """Call a model in its own thread: models run in parallel, calls of one model in order."""
        worker = self.worker(model)
        return worker.thread.submit(worker.score, batch)

    def worker(self, model: RewardModel) -> CheckedReward:
        """Return the checked model with its thread, which are created at the first call."""
        if id(model) not in self.workers:
            checked = CheckedReward(model, self.on_failure, lambda text: self.log(text))
            self.workers[id(model)] = checked
        return self.workers[id(model)]

    def check_default_dtype(self) -> None:
        """Raise RewardFailure if a model left torch's default dtype changed."""
        workers = [*self.workers.values()]
        if any(one.left_dtype == torch.get_default_dtype() for one in workers):
            wait([one.thread.submit(int) for one in workers])  # a model may be loading right now
            check_default_dtype(workers)

    def require(self, output: RewardOutput, name: Callable[[int], str], where: str = "") -> None:
        """Raise RewardFailure if a weighted dimension failed; `name` maps an index to a name."""
        usable = self.usable(output.valid)
        if usable.all():
            return
        i = int((~usable).nonzero()[0])
        raise RewardFailure(
            f"{int((~usable).sum())} of {len(usable)} rewards failed{where}. "
            f"First: {name(i)}: {output.reasons.get(i, 'no reason given')}.\n"
            "Set on_failed_reward to drop_sample to continue without failed samples."
        )

    def usable(self, valid: Bool[Tensor, "n R"]) -> Bool[Tensor, "n"]:
        """Return True for samples with valid scores in all weighted dimensions."""
        return valid[:, self.weights != 0].all(1)


class Scoring:
    """Asynchronous scoring of media that arrive in chunks.

    Models that compare the samples of a group are called once, after the last chunk. The chunks of
    one scoring must together contain whole groups.
    """

    def __init__(self, rewards: Rewards):
        self.rewards = rewards
        self.jobs: list[list[Future[RewardOutput]]] = [[] for _ in rewards.models]
        self.batches: list[MediaBatch] = []
        self.size = 0

    def add(self, batch: MediaBatch) -> None:
        """Submit a chunk to the threads of the models."""
        self.size += len(batch)
        self.rewards.costs.reward_calls += len(batch) * len(self.rewards.models)
        if self.rewards.ranks and not self.rewards.ranks.is_leader:
            return
        compares = False
        for model, jobs in zip(self.rewards.models, self.jobs, strict=True):
            if "groups" in model.spec.needs:
                compares = True
            else:
                jobs.append(self.rewards.submit(model, batch))
        if compares:
            self.batches.append(batch)

    @stage("reward")
    def result(self) -> RewardOutput:
        """Return all dimensions of all chunks, in order; raise RewardError if a model fails."""
        ranks = self.rewards.ranks
        if ranks is None:
            return self._scored()
        scored: Any = self._scored() if ranks.is_leader else None
        return ranks.broadcast_first(scored)

    def _scored(self) -> RewardOutput:
        if self.batches:
            whole = MediaBatch.concat(self.batches)
            self.batches = []
            for model, jobs in zip(self.rewards.models, self.jobs, strict=True):
                if "groups" in model.spec.needs:
                    jobs.append(self.rewards.submit(model, whole))
        if not self.jobs:
            return RewardOutput(torch.zeros(self.size, 0), torch.zeros(self.size, 0).bool())
        columns = [RewardOutput.concat([job.result() for job in jobs]) for jobs in self.jobs]
        self.rewards.check_default_dtype()
        return join_dimensions(columns)


def join_dimensions(columns: Sequence[RewardOutput]) -> RewardOutput:
    """Return the concatenated dimensions of several models for the same samples."""
    reasons: dict[int, str] = {}
    for part in columns:
        for i, why in part.reasons.items():
            reasons[i] = f"{reasons[i]}; {why}" if i in reasons else why
    return RewardOutput(
        torch.cat([c.values for c in columns], 1),
        torch.cat([c.valid for c in columns], 1),
        reasons,
        maps={name: places for column in columns for name, places in column.maps.items()},
    )
