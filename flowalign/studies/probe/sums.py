"""Sum the gradients of a probe's batches in memory that does not grow with the batches.

The gradients of a step are summed over at most 16 blocks of batches. Pairs of blocks give the
signal, and leaving out one block each gives the errors. The 16 x steps sums are exact up to 4 GiB
of main memory: 8 million trained parameters at 8 steps. Larger gradients go through a random
projection, which is linear and unbiased and takes 4 MiB per step.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import safe_open
from torch import Tensor

from flowalign.functional.signal import Products, inner_products, project, random_signs
from flowalign.runs.config import Run
from flowalign.training.learner import Learner, Optimizer
from flowalign.training.policy_gradient.batches import RolloutBatch
from flowalign.training.policy_gradient.policy_gradient_settings import require_policy_gradient
from flowalign.utils.seeds import generator

BLOCKS = 16
"""Largest number of blocks in which batches are summed."""
MOST_BYTES = 2**32
"""Main memory for the sums of gradients, in bytes; gradients that need more are projected."""
PROJECTED = 2**16
"""Dimension of a projected gradient."""

Keep = Callable[[Tensor], Tensor]


class BlockSums:
    """Sums of the gradients of steps over blocks of batches, in main memory.

    It holds blocks x steps gradients, for any number of batches, and at most `MOST_BYTES`.
    """

    def __init__(self, batches: int, keep: Keep):
        blocks = min(batches, BLOCKS)
        self.keep, self.count = keep, [len(range(k, batches, blocks)) for k in range(blocks)]
        self.sums: list[dict[int, Tensor]] = [{} for _ in range(blocks)]

    def add(self, batch: int, step: int, gradient: Float[Tensor, "p"]) -> None:
        """Add the gradient of a step in a batch."""
        into, kept = self.sums[batch % len(self.sums)], self.keep(gradient).cpu()
        into[step] = into[step].add_(kept) if step in into else kept

    def products(self, steps: Sequence[int], scale: Tensor | None = None) -> Products:
        """Return all inner products; a step that no batch of a block trained has the sum 0.

        Raises:
            ValueError: No batch trained any step.
        """
        known = [gradient for block in self.sums for gradient in block.values()]
        if not known:
            raise ValueError("no batch trained any step: all rewards failed or were dominated")
        zero = torch.zeros_like(known[0])
        rows = [[block.get(k, zero) for k in steps] for block in self.sums]
        return inner_products(rows, self.count, scale)


class GradientSums:
    """Gradient sums of a probe, on the main process.

    The second moments of AdamW are `scale`, or the mean squares of the batches' clipped gradients.
    Squares have no sign, so they make no signal from noise.
    """

    def __init__(self, run: Run, learner: Learner, batches: int, scale: Tensor | None):
        self.learner, self.scale, self.norms = learner, scale, list[float]()
        size = sum(p.numel() for p in learner.parameters)
        self.is_projected = is_projected(size, run, batches)
        self.own: dict[int, float] = {}
        """Weight of each step in the run file, in the last batch that trained the step."""
        self.square = None if scale is not None or self.is_projected else torch.zeros(size)
        """Sum of the squares of the clipped gradients. None if not needed, or if gradients are
        projected."""
        device = learner.parameters[0].device
        keep = projection(size, device) if self.is_projected else lambda gradient: gradient
        self.gradient, self.update = BlockSums(batches, keep), None
        if self.is_projected and scale is not None:
            scaling = scale.to(device)
            self.update = BlockSums(batches, lambda gradient: keep(scaling * gradient))

    def add(self, i: int, batch: RolloutBatch, gradients: Iterator[tuple[int, Tensor]]) -> None:
        """Add the gradients of the steps of batch i, one after another."""
        total = torch.zeros(())
        trained = batch.global_mask.any(0)
        weights = {k: float(w) for k, w in enumerate(batch.weight) if trained[k]}
        self.own |= weights
        every = [self.gradient, *([self.update] if self.update else [])]
        for k, gradient in gradients:
            total = total.to(gradient.device) + weights[k] * gradient
            for sums in every if self.learner.processes.is_main else ():
                sums.add(i, k, gradient)
        norm, limit = float(total.norm()), self.learner.cfg.max_grad_norm
        self.norms.append(norm)
        if self.square is not None:
            self.square += (total * min(1.0, limit / (norm + 1e-6))).square().cpu()

    def products(self) -> tuple[Products, Products | None]:
        """Return inner products of the gradients, and of the gradients scaled as by AdamW."""
        steps = sorted(self.own)
        gradient = self.gradient.products(steps)
        if self.update:
            return gradient, self.update.products(steps)
        scale = self.scale
        if self.square is not None:
            scale = _scale(self.square / len(self.norms), self.learner.cfg)
        return gradient, None if scale is None else self.gradient.products(steps, scale)


def is_projected(size: int, run: Run, batches: int) -> bool:
    """Return whether gradients of this size are projected, because their sums need too much memory.

    With 8 steps and 16 blocks, gradients of up to 8 million parameters are kept whole.
    """
    recipe = require_policy_gradient(run.recipe)
    window, num_steps = recipe.sampling.sde_window, recipe.sampling.num_steps
    steps = {
        k
        for i in range(batches)
        for k in window.steps(num_steps, i, generator(run.seed, "window", i))
    }
    return 4 * size * len(steps) * min(batches, BLOCKS) > MOST_BYTES


def adam_scale(moments: Path, learner: Learner) -> Float[Tensor, "p"]:
    """Return AdamW's factor on the mean gradient: 1 / (sqrt(v) + eps), with bias-corrected v.

    Raises:
        ValueError: The moments belong to another model.
    """
    found = []
    with safe_open(moments, "pt") as file:
        known = set(file.keys())
        for name, p in learner.named.items():
            square, step = (f"optimizer.{name}:{key}" for key in ("exp_avg_sq", "step"))
            if square not in known or file.get_slice(square).get_shape() != list(p.shape):
                raise ValueError(f"{moments} has no moments of {name}: it belongs to another model")
            steps = float(file.get_tensor(step))
            unbiased = 1 - learner.cfg.betas[1] ** steps
            found.append(file.get_tensor(square).flatten() / unbiased)
    return _scale(torch.cat(found), learner.cfg)


def projection(size: int, device: torch.device, seed: int = 0) -> Keep:
    """Return a projection to `PROJECTED` sums, which keeps inner products unbiased."""
    signs = random_signs(size, device, seed)
    return lambda gradient: project(gradient, signs, PROJECTED)


def _scale(second: Float[Tensor, "p"], cfg: Optimizer) -> Float[Tensor, "p"]:
    return 1 / (second.sqrt() + cfg.eps)
