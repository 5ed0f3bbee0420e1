"""Run a training loop, and refresh the head of its learned reward between the steps.

step of the inner loop -> a few of its rollouts -> trusted scores -> pairs -> head of the reward
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from flowalign.extra.online_reward.online_reward_settings import OnlineRewardSettings
from flowalign.extra.online_reward.recorder import Recorder
from flowalign.functional.agreement import list_pairs
from flowalign.functional.rating import Features
from flowalign.functional.reward_loss import bradley_terry
from flowalign.rewards.composite import Rewards
from flowalign.training.learner import Learner
from flowalign.training.recipe import Loop
from flowalign.training.trained_weights import TrainedSet
from flowalign.types import MediaBatch, Refreshable, RewardModel


class RewardHead(TrainedSet):
    """Parameters of a reward's head; they require gradients only inside `active`."""

    def __init__(self, model: RewardModel, columns: Sequence[int]):
        assert isinstance(model, Refreshable), "the recipe takes only such rewards"
        self.model, self.columns = model, list(columns)
        self.named = dict(model.head())

    @override
    @contextmanager
    def active(self) -> Iterator[None]:
        before = {name: p.requires_grad for name, p in self.named.items()}
        for p in self.named.values():
            p.requires_grad_(True)
        try:
            yield
        finally:
            for name, p in self.named.items():
                p.requires_grad_(before[name])

    def scores(self, features: Features) -> Float[Tensor, "n D"]:
        """Return the scores in the refreshed dimensions."""
        return self.model.score_features(features)[:, self.columns]


class OnlineRewardLoop(Loop):
    """Wrapper of a loop that refreshes the reward head after every `every` steps."""

    def __init__(
        self,
        cfg: OnlineRewardSettings,
        inner: Loop,
        recorder: Recorder,
        learner: Learner,
        head: RewardHead,
        trusted: Rewards,
    ):
        self.cfg, self.inner, self.recorder = cfg, inner, recorder
        self.learner, self.head, self.trusted = learner, head, trusted

    @override
    def run(self, steps: Iterable[int]) -> Iterator[dict[str, float]]:
        steps = list(steps)
        for step, metrics in zip(steps, self.inner.run(steps), strict=True):
            batch, start = self.recorder.taken(), time.perf_counter()
            if (step + 1) % self.cfg.every:
                yield metrics
                continue
            found = self._refresh(batch)
            yield metrics | found | {"timing/refresh": time.perf_counter() - start}

    @override
    def evaluate(self) -> dict[str, float]:
        return self.inner.evaluate()

    @override
    def draw(self) -> float:
        return self.inner.draw()

    @override
    def state(self) -> dict[str, Any]:
        return {"inner": self.inner.state()}

    @override
    def restore(self, state: Mapping[str, Any]) -> None:
        self.inner.restore(state["inner"])

    def _refresh(self, batch: MediaBatch | None) -> dict[str, float]:
        """Train the head on the pairs of all processes, and return the metrics.

        Each process contributes the pairs of its recorded samples.
        """
        processes, asked = self.learner.processes, 0 if batch is None else len(batch)
        lead, first, second, features = self._judge(batch) if batch else _no_judgement()
        counted = {"asked": float(asked), "pairs": float((lead != 0).sum())}
        total = processes.sum_by_name(counted)
        metrics = {f"refresh/{name}": value for name, value in total.items()}
        if not total["pairs"]:
            return metrics
        for update in range(self.cfg.head_updates):
            loss, right = self._step(lead, first, second, features, total["pairs"])
            mean = processes.sum_by_name({"loss": loss, "agreement": right})
            if update == 0:  # log the values before the head is trained
                metrics |= {f"refresh/{name}": value for name, value in mean.items()}
        return metrics

    def _judge(
        self, batch: MediaBatch
    ) -> tuple[Float[Tensor, "p D"], Int[Tensor, "p"], Int[Tensor, "p"], Features]:
        """Return the trusted score differences of all pairs, the pairs, and their features.

        A difference is 0 for ties and unknown scores.
        """
        cfg, output = self.cfg, self.trusted.score(batch)
        if cfg.on_failed_reward == "raise":
            self.trusted.require(output, lambda i: f"prompt {batch.prompts[i]!r}")
        columns = [self.trusted.dims.index(dim) for dim in cfg.dims.values()]
        first, second = list_pairs(torch.tensor(batch.groups))
        lead = output.values[first][:, columns] - output.values[second][:, columns]
        told = lead.isfinite() & (lead.abs() > cfg.min_gap)
        return torch.where(told, lead, 0.0), first, second, self.head.model.features(batch)

    def _step(
        self,
        lead: Float[Tensor, "p D"],
        first: Int[Tensor, "p"],
        second: Int[Tensor, "p"],
        features: Features,
        total: float,
    ) -> tuple[float, float]:
        """Make one update; return this process's part of the mean loss and pair accuracy."""
        loss, right = 0.0, 0.0
        if len(lead):
            with self.head.active():
                scores = self.head.scores(features)
                a, b = scores[first.to(scores.device)], scores[second.to(scores.device)]
                lead = lead.to(scores.device)
                each = bradley_terry(a, b, (lead > 0).to(a)) * (lead != 0)
                self.learner.backward(each.sum() / total)
            loss = float(each.detach().sum() / total)
            right = float(((a - b).detach() * lead > 0).sum() / total)
        self.learner.step()
        return loss, right


def _no_judgement() -> tuple[Tensor, Tensor, Tensor, Features]:
    """Return empty results for a process without recorded samples."""
    none = torch.zeros(0, dtype=torch.long)
    return torch.zeros(0, 1), none, none, Features(torch.zeros(0, 1), torch.zeros(0, 1))
