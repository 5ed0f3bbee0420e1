"""Train a reward model on human preferences: a head, and optionally adapters of the backbone."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from flowalign.functional.rating import Features, Rater, Ratings
from flowalign.reward_training.embeddings import embed_samples
from flowalign.reward_training.labels import Preferences, measure_agreement
from flowalign.reward_training.training_parts import (
    Dimension,
    NoisedFeatures,
    Schedule,
    first_stage,
)
from flowalign.training.learner import Optimizer
from flowalign.types import Backbone, Head
from flowalign.utils.errors import TrainingFailure
from flowalign.utils.seeds import generator

_RECORDS_AT_ONCE = 256


class RewardTrainer:
    """Trainer of a reward model, up to the best weights on the held-out records.

    All random draws are functions of the seed and of the update, so a resumed training gives the
    same result. `features` belong to `preferences.samples` under the loaded backbone. Noised
    features are drawn anew for each update, and evaluated with fixed draws.
    """

    def __init__(
        self,
        backbone: Backbone,
        head: Head,
        dimensions: Mapping[str, Dimension],
        preferences: Preferences,
        features: Features | NoisedFeatures,
        optimizer: Optimizer,
        schedule: Schedule,
        seed: int = 0,
    ):
        self.backbone, self.dimensions, self.preferences = backbone, dimensions, preferences
        self.cfg, self.schedule, self.seed = optimizer, schedule, seed
        self.device = next(backbone.network.parameters()).device
        self.noised = None if isinstance(features, Features) else features
        """Source of noised features for each update. None for features of finished samples."""
        known = features if isinstance(features, Features) else features.draw_held_out()
        self.features = Features(known.joint.nan_to_num(), known.prompt.nan_to_num())
        self.tuned = any(p.requires_grad for p in backbone.network.parameters())
        """Whether the backbone has adapters, which means that features change during training."""
        self.rater = self._rater(head)
        self.losses = nn.ModuleDict({f"{i}": d.loss for i, d in enumerate(dimensions.values())})
        self.targets = (preferences.labels - self.rater.shift.cpu()) / self.rater.factor.cpu()
        if schedule.ridge:
            dims = list(dimensions.values())
            first_stage(schedule.ridge, self.rater, self.features, preferences, self.targets, dims)
        self.rater.to(self.device)
        self.losses.to(self.device)
        self.optimizer = self._optimizer()
        self.update = self.epoch = self.skipped_in_a_row = self.best_epoch = 0
        self.best_loss = math.inf
        self.best: dict[str, Tensor] = {}

    @property
    def finished(self) -> bool:
        """Whether all epochs are done, or the last `patience` epochs did not lower the loss."""
        waited = self.epoch - self.best_epoch
        return self.epoch >= self.schedule.epochs or waited >= self.schedule.patience

    def epochs(self) -> Iterator[dict[str, float]]:
        """Train, yielding the metrics of each epoch; the state may be saved between two epochs."""
        train = self.preferences.rows("train")
        while not self.finished:
            order = torch.randperm(len(train), generator=generator(self.seed, "order", self.epoch))
            metrics = [self._step(rows) for rows in train[order].split(self.schedule.batch_size)]
            self.epoch += 1
            yield self._assess(metrics)

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters that training changes, by name."""
        modules = {"rater": self.rater, "losses": self.losses, "backbone": self.backbone.network}
        return {
            f"{name}.{n}": p
            for name, module in modules.items()
            for n, p in module.named_parameters()
            if p.requires_grad
        }

    def use_best(self) -> None:
        """Load the weights of the best epoch."""
        with torch.no_grad():
            for name, parameter in self.trained().items():
                parameter.copy_(self.best[name])

    @torch.no_grad()
    def scores(self, rows: Int[Tensor, "n"]) -> Ratings:
        """Return ratings of records, [n, m, R], on the CPU, in evaluation mode."""
        self.rater.eval()
        cpu = torch.device("cpu")
        parts = [self._rate(some).to(cpu) for some in rows.split(_RECORDS_AT_ONCE)]
        spread = [p.log_variance for p in parts if p.log_variance is not None]
        return Ratings(torch.cat([p.score for p in parts]), torch.cat(spread) if spread else None)

    def _rater(self, head: Head) -> Rater:
        """Build a fresh rater with the features' statistics and the units of the ratings."""
        joint, prompt = self.features.joint.shape[1], self.features.prompt.shape[1]
        with seeded_draws(self.seed, self.device, "head"):
            built = head.build(joint, prompt, tuple(self.dimensions))
        rater = Rater(built, joint, prompt, len(self.dimensions))
        train = self.preferences.rows("train")
        labels = self.preferences.labels[train]
        seen = self.preferences.candidate[train][labels.isfinite().any(2)]
        rater.joint.fit(self.features.joint[seen])
        rater.prompt.fit(self.features.prompt[seen])
        for d, (name, dimension) in enumerate(self.dimensions.items()):
            given = labels[..., d][labels[..., d].isfinite()]
            if not len(given):
                raise ValueError(f"no record with a label of {name!r} is left to train on")
            if not dimension.loss.compares:
                rater.shift[d], rater.factor[d] = given.mean(), given.std(correction=0).clamp(1e-6)
        _check_variance(rater, self.features, self.dimensions)
        return rater

    def _optimizer(self) -> torch.optim.AdamW:
        weights = [p for n, p in self.trained().items() if not n.startswith("losses.")]
        if not weights:
            raise ValueError("schedule.ridge.freeze leaves no trainable weights in this head")
        own = [p for n, p in self.trained().items() if n.startswith("losses.")]
        groups = [{"params": weights}, {"params": own, "weight_decay": 0.0}]
        cfg = self.cfg
        common = {"weight_decay": cfg.weight_decay, "betas": cfg.betas, "eps": cfg.eps}
        return torch.optim.AdamW(groups, lr=cfg.learning_rate, **common)

    def _step(self, rows: Int[Tensor, "n"]) -> dict[str, float]:
        """Run one update on some records; skip it if the gradient is not finite."""
        train = self.preferences.rows("train")
        total = self.schedule.epochs * math.ceil(len(train) / self.schedule.batch_size)
        for group in self.optimizer.param_groups:
            group["lr"] = self.cfg.rate(self.update, total)
        self.rater.train()
        with seeded_draws(self.seed, self.device, "update", self.update):
            losses = self._losses(self._rate(rows), rows)
        self.update += 1
        if not losses:  # no label among these records
            return {}
        self.optimizer.zero_grad(set_to_none=True)
        weigh_losses(self.dimensions, losses).backward()
        norm = float(nn.utils.clip_grad_norm_(self.trained().values(), self.cfg.max_grad_norm))
        self.skipped_in_a_row = 0 if math.isfinite(norm) else self.skipped_in_a_row + 1
        if not self.skipped_in_a_row:
            self.optimizer.step()
        self.cfg.check_skipped(self.skipped_in_a_row)
        found = {f"train/{name}/loss": float(loss.detach()) for name, loss in losses.items()}
        return found | {"optim/grad_norm": norm}

    def _rate(self, rows: Int[Tensor, "n"]) -> Ratings:
        """Return ratings of records, [n, m, R]; ignore entries beyond a record's candidates."""
        used, place = self.preferences.candidate[rows].clamp(min=0).unique(return_inverse=True)
        return self.rater(self._features(used))[place]

    def _features(self, used: Int[Tensor, "k"]) -> Features:
        if self.noised and self.rater.training:
            return self.noised.draw(used, self.update).to(self.device)
        if not self.tuned:
            return self.features.take(used).to(self.device)
        samples = [self.preferences.samples[i] for i in used.tolist()]
        features, failed = embed_samples(self.backbone, samples)
        labels = self.preferences.labels.isfinite().any(2)
        needed = set(self.preferences.candidate[labels].tolist())
        if lost := [why for row, why in failed.items() if int(used[row]) in needed]:
            raise OSError(f"a sample has become unreadable during training: {lost[0]}")
        keep = torch.tensor([row not in failed for row in range(len(used))])[:, None]
        joint = torch.where(keep, features.joint, 0.0)
        return Features(joint, torch.where(keep, features.prompt, 0.0)).to(self.device)

    def _losses(self, ratings: Ratings, rows: Int[Tensor, "n"]) -> dict[str, Float[Tensor, ""]]:
        """Return the mean loss of each dimension over its labelled items, if it has any."""
        found = {}
        for d, (name, dimension) in enumerate(self.dimensions.items()):
            labels = self.targets[rows, :, d].to(ratings.score.device)
            items = dimension.loss(ratings[..., d], labels, dimension.labels)
            if len(items):
                found[name] = items.mean()
        return found

    @torch.no_grad()
    def _assess(self, steps: list[dict[str, float]]) -> dict[str, float]:
        """Return the metrics of this epoch; keep its weights if its held-out loss is lowest."""
        rate = float(self.optimizer.param_groups[0]["lr"])
        metrics = {"epoch": float(self.epoch), "optim/learning_rate": rate}
        for name in sorted({name for step in steps for name in step}):
            values = [step[name] for step in steps if name in step]
            metrics[name] = sum(values) / len(values)
        rows = self.preferences.rows("held_out")
        ratings = self.scores(rows).to(self.device)
        losses = self._losses(ratings, rows)
        held_out = float(weigh_losses(self.dimensions, losses)) if losses else math.nan
        metrics |= {f"held_out/{name}/loss": float(loss) for name, loss in losses.items()}
        metrics["held_out/loss"] = held_out
        metrics |= self._agreement(rows, ratings.score.cpu())
        if held_out < self.best_loss:
            self.best_loss, self.best_epoch = held_out, self.epoch
            self.best = {n: p.detach().clone() for n, p in self.trained().items()}
        elif not self.best:
            raise TrainingFailure(f"the held-out loss of the first epoch is {held_out}")
        return metrics

    def _agreement(self, rows: Tensor, score: Float[Tensor, "n m R"]) -> dict[str, float]:
        found, wanted = {}, ("accuracy", "accuracy_with_ties", "spearman")
        for d, (name, dimension) in enumerate(self.dimensions.items()):
            labels = self.preferences.labels[rows, :, d]
            some = measure_agreement(score[..., d], labels, dimension.labels)
            found |= {f"held_out/{name}/{key}": some[key] for key in wanted if key in some}
        return found


def weigh_losses(
    dimensions: Mapping[str, Dimension], losses: Mapping[str, Float[Tensor, ""]]
) -> Float[Tensor, ""]:
    """Return the weighted sum of the dimensions' losses."""
    return torch.stack([dimensions[n].weight * loss for n, loss in losses.items()]).sum()


def _check_variance(rater: Rater, features: Features, dimensions: Mapping[str, Dimension]) -> None:
    """Raise ValueError unless the head predicts a variance exactly if a loss needs one."""
    gives = rater.eval()(features.take(torch.tensor([0]))).log_variance is not None
    wants = [n for n, d in dimensions.items() if d.loss.needs_variance]
    if wants and not gives:
        raise ValueError(
            f"the loss of {', '.join(wants)} needs a head that predicts a variance: "
            "set its uncertainty to true"
        )
    if gives and not wants:
        remedy = "set it to false, or use the loss Uncertainty or Thurstone"
        raise ValueError(f"no loss trains the head's uncertainty: {remedy}")


@contextmanager
def seeded_draws(seed: int, device: torch.device, purpose: str, *index: int) -> Iterator[None]:
    """Set torch's random state from a seed and a purpose, and restore the old state at the end."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(generator(seed, purpose, *index).initial_seed())
        yield
