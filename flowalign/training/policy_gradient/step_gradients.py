"""Weight denoising steps by the measured signal and noise of their gradients.

The gradients are measured over two halves of the prompts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from flowalign.functional.signal import (
    Moments,
    best_weights,
    moments_of_halves,
    project,
    random_signs,
    subtract_estimation_error,
)
from flowalign.functional.surrogate import StepWeight
from flowalign.training.engine import Term
from flowalign.training.learner import Learner
from flowalign.training.policy_gradient.batches import RolloutBatch, policy_term, rows_of
from flowalign.types import Batch, PolicyLoss
from flowalign.utils.ranges import PositiveFloat, Settings, UnitInterval

Quantity = Literal["gradient", "update"]
_TINY = 1e-300


@dataclass(frozen=True, kw_only=True)
class MeasuredWeight(Settings, key="recipe.step_weight"):
    """Settings of step weights that maximise the signal-to-noise ratio of the gradient.

    The weights are updated during training. The gradient of each step is computed with equal
    weights over two halves of the prompts, and the part common to both is signal. The update sums
    the gradients of steps, multiplied by weights from earlier training steps, so that no gradient
    affects its own weight. The weight of a step multiplies its whole loss, including the KL term.
    """

    measured: Quantity = "gradient"
    """Measured quantity. gradient: the gradients. update: AdamW's updates, with each gradient entry
    divided by sqrt(v) + eps and the second moment v of earlier updates."""
    half_life: PositiveFloat = 40.0
    """Half-life of a measurement in the averages, in training steps. After one half-life, each
    weight is the mean of the starting weight and the best measured weight."""
    floor: UnitInterval = 0.05
    """Smallest weight of a trained step, as a share of the largest."""
    start: Literal[StepWeight, "noise"] | list[PositiveFloat] = "noise"
    """Starting weights, used while there are few measurements. noise: 1 / sqrt(noise), which is
    optimal if all steps have the same signal-to-noise ratio; 1 before the first measurement. Also:
    another rule, or a number for each denoising step."""

    def weights(
        self, averages: "Averages", start: Float[Tensor, "T"], trained: Bool[Tensor, "T"]
    ) -> Float[Tensor, "T"]:
        """Return the weights of all steps: mean 1 over the trained steps, 0 elsewhere.

        A step without measurements keeps its starting weight. If no step has a signal above the
        estimation error, no weight changes.
        """
        steps = trained.cpu().nonzero()[:, 0]
        weight = start[trained].double().cpu()
        weight /= weight.mean()
        evidence = averages.evidence.diagonal()[steps]
        known = evidence > 0
        found = averages.of(steps[known])
        if self.start == "noise":
            even = found.noise.diagonal().clamp(min=_TINY).rsqrt()
            weight[known] = even / even.mean()
        best = best_weights(subtract_estimation_error(found))
        if best.any():
            best *= weight[known].sum() / best.sum()
            weight[known] = torch.lerp(weight[known], best, evidence[known])
        weight = weight.clamp(min=self.floor * float(weight.max()))
        result = torch.zeros_like(start)
        result[trained] = (weight / weight.mean()).to(result)
        return result


@dataclass(frozen=True)
class Averages:
    """Running averages of signal and noise for pairs of steps, over updates that trained both."""

    signal: Float[Tensor, "T T"]
    """Exponentially weighted sums of m_k . m_j."""
    noise: Float[Tensor, "T T"]
    """Exponentially weighted sums of the inner products of the noise."""
    evidence: Float[Tensor, "T T"]
    """Sums of the weights, from 0 before the first measurement towards 1 after many."""

    @staticmethod
    def none(num_steps: int) -> "Averages":
        """Return averages without measurements."""
        zero = torch.zeros(num_steps, num_steps, dtype=torch.float64)
        return Averages(zero, zero, zero)

    def of(self, steps: Int[Tensor, "K"]) -> Moments:
        """Return the averages of some steps; 0 for pairs that were never trained together."""
        at = steps[:, None], steps
        evidence = self.evidence[at].where(self.evidence[at] > 0, 1.0)
        return Moments(self.signal[at] / evidence, self.noise[at] / evidence)

    def after(self, found: Moments, steps: Int[Tensor, "K"], decay: float) -> "Averages":
        """Return the averages after one more measurement of some steps."""
        at = steps[:, None], steps

        def moved(before: Tensor, new: Tensor) -> Tensor:
            after = before.clone()
            after[at] = decay * before[at] + (1 - decay) * new
            return after

        one = torch.ones_like(found.signal)
        return Averages(
            moved(self.signal, found.signal),
            moved(self.noise, found.noise),
            moved(self.evidence, one),
        )


MOST_BYTES = 2**30
"""Memory limit for the gradients of all steps over both halves, in bytes; above it gradients are
projected."""
PROJECTED = 2**16
"""Number of dimensions of a projected gradient."""


class StepGradients:
    """Weighted gradients of denoising steps, with running averages of their signal and noise."""

    def __init__(self, cfg: MeasuredWeight, learner: Learner, num_steps: int, updates: int):
        if learner.is_sharded:
            raise ValueError(
                "recipe.step_weight measures whole gradients, but sharding.weights blocks shards "
                "them if policy.lora is null: set policy.lora, or another step_weight"
            )
        self.cfg, self.learner = cfg, learner
        self.averages = Averages.none(num_steps)
        self.decay = 0.5 ** (1 / (cfg.half_life * updates))
        """Decay of earlier measurements per update."""
        size = sum(p.numel() for p in learner.parameters)
        self.size = projected_size(size, num_steps)
        device = learner.processes.device
        self.signs = None if self.size == size else random_signs(size, device)

    def term(
        self,
        algorithm: PolicyLoss,
        batch: RolloutBatch,
        samples: Int[Tensor, "n"],
        micro_batch: int,
        measures: bool,
    ) -> Term:
        """Return the loss on samples of all ranks, with weighted gradients of denoising steps.

        Its rows are those of one half of the prompts after the other. If `measures` is set, the
        gradients of both halves update the averages.
        """
        equal = batch.with_steps(weight=torch.ones_like(batch.weight))
        term = policy_term(algorithm, equal, samples, self.learner, micro_batch)
        parts = halves(samples, batch.trajectory.group_size)
        found = [rows_of(batch, batch.local(part)) for part in parts]
        rows = [
            part.with_columns(part=torch.full((part.num_rows,), i)) for i, part in enumerate(found)
        ]
        observer = HalvesObserver(self, batch, samples, measures)
        return replace(term, rows=Batch.concat(rows), after=observer.after, end=observer.end)

    def metrics(self, weight: Float[Tensor, "T"]) -> dict[str, float]:
        """Return the weights of a training step, and the averages of signal and noise after it.

        Denoising steps with weight 0 are omitted.
        """
        steps = weight.cpu().nonzero()[:, 0]
        found, known = self.averages.of(steps), self.averages.evidence.diagonal()[steps] > 0
        columns = {
            "weight": weight.cpu()[steps],
            "signal": found.signal.diagonal().where(known, torch.nan),
            "noise": found.noise.diagonal().where(known, torch.nan),
        }
        return {
            f"step_{name}/{k}": value
            for name, column in columns.items()
            for k, value in zip(steps.tolist(), column.tolist(), strict=True)
        }

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        averages = {name: value.tolist() for name, value in vars(self.averages).items()}
        return {"measured": self.cfg.measured} | averages

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the averages of a checkpoint.

        Raises:
            ValueError: The averages are for another quantity or number of denoising steps.
        """
        names = ("signal", "noise", "evidence")
        averages = Averages(*(torch.tensor(state[n], dtype=torch.float64) for n in names))
        here = self.cfg.measured, len(self.averages.signal)
        there = state["measured"], len(averages.signal)
        if here != there:
            raise ValueError(
                f"recipe.step_weight measures the {here[0]} of {here[1]} denoising steps, but in "
                f"the checkpoint the {there[0]} of {there[1]}: restore these settings"
            )
        self.averages = averages

    def include(
        self, kept: Float[Tensor, "2 K p"], shares: tuple[float, float], steps: Int[Tensor, "K"]
    ) -> None:
        """Add the gradients of all ranks to the averages, unless one is not finite."""
        found = moments_of_halves(kept, shares)
        if found.noise.isfinite().all():
            self.averages = self.averages.after(found, steps, self.decay)

    def scale(self) -> Tensor | None:
        """Return the factor from each gradient entry to the measured quantity.

        It is None if the updates are measured and AdamW has no second moment yet.
        """
        loss_scale = self.learner.scaler.get_scale()
        if self.cfg.measured == "gradient":
            return torch.tensor(1 / loss_scale, device=self.learner.processes.device)
        optimizer = self.learner.optimizer
        (group,), factors = optimizer.param_groups, []
        for p in self.learner.parameters:
            if not (state := optimizer.state.get(p)):
                return None
            second = state["exp_avg_sq"].to(p.device) / (
                1 - group["betas"][1] ** float(state["step"])
            )
            factors.append(1 / (second.sqrt() + group["eps"]).flatten())
        return torch.cat(factors).float() / loss_scale


class HalvesObserver:
    """Weighted sum of the gradients of denoising steps, and their sums over both halves."""

    def __init__(
        self,
        steps: StepGradients,
        batch: RolloutBatch,
        samples: Int[Tensor, "n"],
        measures: bool,
    ):
        self.steps, self.parameters = steps, steps.learner.parameters
        self.sums: dict[nn.Parameter, Tensor] = {}
        """Weighted sums, separate from the gradients of the parameters."""
        self.weight = batch.weight.tolist()
        self.scale = steps.scale() if measures else None
        """Factor on measured gradients; None if they are not measured."""
        self.trained = batch.global_mask[samples].any(0).nonzero()[:, 0]
        """Denoising steps that any rank trains."""
        first, second = map(len, halves(samples, batch.trajectory.group_size))
        self.shares = first / len(samples), second / len(samples)
        self.kept = torch.zeros(
            2, len(self.trained), steps.size, device=steps.learner.processes.device
        )

    def after(self, rows: Batch) -> None:
        """Add the gradient of a micro-batch to the sums, and remove it."""
        half, k = int(rows["part"][0]), int(rows["k"][0])
        if self.scale is not None:
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
            whole = torch.cat([g.flatten().float() for g in grads]).mul_(self.scale)
            signs, place = self.steps.signs, int((self.trained == k).nonzero())
            kept = whole if signs is None else project(whole, signs, self.steps.size)
            self.kept[half, place] += kept
        for p in self.parameters:
            if p.grad is not None:
                total = self.sums.get(p)
                total = torch.zeros_like(p) if total is None else total
                self.sums[p] = total.add_(p.grad, alpha=self.weight[k])
                p.grad = None

    def end(self) -> None:
        """Set the gradients to their weighted sums, and add the measurement to the averages."""
        for p, total in self.sums.items():
            p.grad = total
        if self.scale is not None:
            kept = self.steps.learner.processes.sum(self.kept)
            self.steps.include(kept, self.shares, self.trained)


def halves(samples: Int[Tensor, "n"], group_size: int) -> tuple[Tensor, Tensor]:
    """Return the samples of the first and of the second half of the prompts."""
    prompt = samples // group_size
    present = prompt.unique()
    first = prompt < present[len(present) // 2]
    return samples[first], samples[~first]


def projected_size(size: int, num_steps: int) -> int:
    """Return the number of dimensions to keep of a gradient with `size` entries."""
    return size if 2 * num_steps * 4 * size <= MOST_BYTES else min(size, PROJECTED)
