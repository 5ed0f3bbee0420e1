"""Weight the gradients of denoising steps, and measure them over two halves of the prompts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from typing_extensions import override

from flowalign.functional.signal import moments_of_halves, project, random_signs
from flowalign.training.engine import GradientObserver, Term
from flowalign.training.learner import Learner
from flowalign.training.policy_gradient.batches import RolloutBatch, policy_term, rows_of
from flowalign.training.policy_gradient.measured import Averages, MeasuredWeight
from flowalign.training.policy_gradient.policy_gradient_settings import PolicyGradientSettings
from flowalign.types import Batch

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
        cfg: PolicyGradientSettings,
        batch: RolloutBatch,
        samples: Int[Tensor, "n"],
        measures: bool,
    ) -> Term:
        """Return the loss on samples of all ranks, with weighted gradients of denoising steps.

        Its rows are those of one half of the prompts after the other. If `measures` is set, the
        gradients of both halves update the averages.
        """
        equal = batch.with_steps(weight=torch.ones_like(batch.weight))
        term = policy_term(cfg.algorithm, equal, samples, self.learner, cfg.micro_batch)
        parts = halves(samples, batch.trajectory.group_size)
        found = [rows_of(batch, batch.local(part)) for part in parts]
        rows = [
            part.with_columns(part=torch.full((part.num_rows,), i)) for i, part in enumerate(found)
        ]
        observer = HalvesObserver(self, batch, samples, measures)
        return replace(term, rows=Batch.concat(rows), observer=observer)

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
        return {"measured": self.cfg.measured} | self.averages.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the averages of a checkpoint.

        Raises:
            ValueError: The averages are for another quantity or number of denoising steps.
        """
        averages = Averages.restored(state)
        here = self.cfg.measured, len(self.averages.signal)
        there = state["measured"], len(averages.signal)
        if here != there:
            raise ValueError(
                f"recipe.step_weight measures the {here[0]} of {here[1]} denoising steps, but the "
                f"checkpoint has averages of the {there[0]} of {there[1]}:\n"
                "set recipe.step_weight.measured and recipe.sampling.num_steps to its values"
            )
        self.averages = averages

    def include(
        self, kept: Float[Tensor, "2 K p"], shares: tuple[float, float], steps: Int[Tensor, "K"]
    ) -> None:
        """Add the gradients of all ranks to the averages, unless one is not finite."""
        found = moments_of_halves(kept, shares)
        if found.noise.isfinite().all():
            self.averages = self.averages.after(found, steps, self.decay)

    def keep(self, gradient: Float[Tensor, "p"]) -> Float[Tensor, "q"]:
        """Return the gradient, or its projection."""
        return gradient if self.signs is None else project(gradient, self.signs, self.size)

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


class HalvesObserver(GradientObserver):
    """Weighted sum of the gradients of denoising steps, and their sums over both halves."""

    def __init__(
        self,
        steps: StepGradients,
        batch: RolloutBatch,
        samples: Int[Tensor, "n"],
        measures: bool,
    ):
        self.steps, self.sums = steps, _Sums(steps.learner.parameters)
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

    @override
    def after(self, rows: Batch) -> None:
        half, k = int(rows["part"][0]), int(rows["k"][0])
        if self.scale is not None:
            place = int((self.trained == k).nonzero())
            self.kept[half, place] += self.steps.keep(self.sums.latest().mul_(self.scale))
        self.sums.take(self.weight[k])

    @override
    def end(self) -> None:
        self.sums.put()
        if self.scale is not None:
            kept = self.steps.learner.processes.sum(self.kept)
            self.steps.include(kept, self.shares, self.trained)


class _Sums:
    """Weighted sums of gradients, separate from the gradients of the parameters."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters = parameters
        self.sums: dict[nn.Parameter, Tensor] = {}

    def latest(self) -> Float[Tensor, "p"]:
        """Return the gradient accumulated since the last `take`."""
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        return torch.cat([g.flatten().float() for g in found])

    def take(self, weight: float) -> None:
        """Add the accumulated gradient to the sums, and clear it."""
        grads = {p: p.grad for p in self.parameters if p.grad is not None}
        self.sums |= {p: torch.zeros_like(p) for p in grads if p not in self.sums}
        if grads:
            torch._foreach_add_([self.sums[p] for p in grads], list(grads.values()), alpha=weight)
        for p in grads:
            p.grad = None

    def put(self) -> None:
        """Set the gradients of the parameters to the sums."""
        for p, total in self.sums.items():
            p.grad = total


def halves(samples: Int[Tensor, "n"], group_size: int) -> tuple[Tensor, Tensor]:
    """Return the samples of the first and of the second half of the prompts."""
    prompt = samples // group_size
    present = prompt.unique()
    first = prompt < present[len(present) // 2]
    return samples[first], samples[~first]


def projected_size(size: int, num_steps: int) -> int:
    """Return the number of dimensions to keep of a gradient with `size` entries."""
    return size if 2 * num_steps * 4 * size <= MOST_BYTES else min(size, PROJECTED)
