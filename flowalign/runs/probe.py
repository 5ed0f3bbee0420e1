"""Measure signal and noise of each denoising step's gradient, at fixed weights."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.data.requests import Requests, read_requests
from flowalign.functional.signal import (
    best_weights,
    crossed,
    jackknife,
    moments,
    signal_to_noise,
)
from flowalign.runs.bench import credited, opened
from flowalign.runs.config import Run
from flowalign.training.learner import Learner
from flowalign.training.policy_gradient.batches import TrainBatch, portions
from flowalign.training.policy_gradient.batches import minibatch as minibatch_of
from flowalign.training.policy_gradient.loop import PolicyGradientLoop
from flowalign.training.policy_gradient.rollouts import rollout
from flowalign.training.policy_gradient.settings import Settings
from flowalign.utils.costs import Costs

MOST_BYTES = 2**30
"""Memory for the gradients of all batches; larger ones are projected."""
PROJECTED = 2**16
"""Dimensions of a projected gradient."""


@dataclass(frozen=True)
class Probe:
    """Holds the gradients of independent batches at the same weights, and what they cost."""

    num_steps: int
    """Denoising steps of a rollout."""
    steps: list[int]
    """Those of them that any of the batches trained."""
    products: Float[Tensor, "B K B K"]
    """Inner products of their gradients, each as if all steps had the weight 1."""
    own: Float[Tensor, "K"]
    """Weights that the run file gives these steps."""
    is_projected: bool
    """Whether the gradients were projected, which adds noise to their products but no bias."""
    costs: Costs
    """What all batches cost together."""
    seconds: float
    """Time for all batches."""

    def overlay(self, weights: Float[Tensor, "K"]) -> list[float]:
        """Return weights of all denoising steps, as `recipe.step_weight` takes them."""
        found = [0.0] * self.num_steps
        for step, weight in zip(self.steps, weights.tolist(), strict=True):
            found[step] = round(weight, 4)
        return found

    def summary(self) -> dict[str, Any]:
        """Return signal and noise of each step and of all, with standard errors and costs."""
        count, found = len(self.products), moments(self.products)
        best = best_weights(found)
        signal, error = jackknife(self.products, lambda m: m.signal.diagonal())
        evaluations = self.costs.network_evaluations / count
        totals = {"equal": torch.ones_like(best), "run file": self.own}
        rows = {name: _with_error(self.products, weights) for name, weights in totals.items()}
        rows["best, judged by other batches"] = {"signal_to_noise": float(crossed(self.products))}
        for row in rows.values():
            row["per_1000_evaluations"] = 1000 * row["signal_to_noise"] / evaluations
        return {
            "step_weight": self.overlay(best),
            "batches": count,
            "projected": self.is_projected,
            "steps": [
                {
                    "step": step,
                    "signal": float(signal[i]),
                    "signal_error": float(error[i]),
                    "noise": float(found.noise[i, i]),
                    "weight": float(self.own[i]),
                    "best_weight": float(best[i]),
                }
                for i, step in enumerate(self.steps)
            ],
            "weights": rows,
            "a_batch": {
                "network_evaluations": evaluations,
                "reward_calls": self.costs.reward_calls / count,
                "decodes": self.costs.decodes / count,
                "seconds": self.seconds / count,
            },
        }


def probe(
    run: Run, batches: int, weights: str | None = None, log: Callable[[str], None] = lambda _: None
) -> Probe:
    """Sample and credit batches of different prompts, and compare the gradients of their steps.

    No weight changes. `weights` is a folder of saved weights, such as one of a checkpoint.

    Raises:
        ValueError: The recipe has no rollouts, there are fewer than four batches, or the weights
            are not of this model.
    """
    if batches < 4:
        raise ValueError(f"batches is {batches}; signal, noise and their errors need at least 4")
    recipe, learner, rewards, costs = opened(run)
    if weights:
        run.policy.load_weights(weights)
    requests = Requests(read_requests(recipe.prompts), run.seed)
    loop = PolicyGradientLoop(recipe, learner, rewards, requests, run.seed)
    gradients: list[dict[int, Tensor]] = []
    own: dict[int, float] = {}
    before, start = replace(costs), time.perf_counter()
    keep, is_projected = _keeper(learner, batches * recipe.sampling.num_steps)
    for i in range(batches):
        chosen = requests.batch(i, recipe.prompts_per_step)
        batch = credited(recipe, learner, loop, rollout(recipe, learner, chosen, run.seed, i))
        own |= {k: float(w) for k, w in enumerate(batch.weight) if batch.global_mask[:, k].any()}
        gradients.append({k: keep(g) for k, g in gradients_of_steps(recipe, learner, batch)})
        log(f"batch {i + 1} of {batches}")
    spent = {name: n - asdict(before)[name] for name, n in asdict(costs).items()}
    return Probe(
        recipe.sampling.num_steps,
        sorted(own),
        _products(gradients, sorted(own)),
        torch.tensor([own[k] for k in sorted(own)], dtype=torch.float64),
        is_projected,
        Costs(**spent),
        time.perf_counter() - start,
    )


def gradients_of_steps(
    recipe: Settings, learner: Learner, batch: TrainBatch
) -> Iterator[tuple[int, Float[Tensor, "p"]]]:
    """Yield the gradient that each denoising step adds to the update, as if it had the weight 1.

    They are summed over processes and add up to the gradient of the loss with equal weights.
    """
    batch = replace(batch, weight=torch.ones_like(batch.weight))
    num_trained, rows = int(batch.global_mask.sum()), torch.arange(len(batch.mask))
    local: dict[int, list[Tensor]] = {}
    for k, chosen in portions(batch, rows, recipe.micro_batch):
        local.setdefault(k, []).append(chosen)
    for k in batch.global_mask.any(0).nonzero().flatten().tolist():
        learner.optimizer.zero_grad(set_to_none=True)
        for chosen in local.get(k, []):
            one = minibatch_of(batch, k, chosen)
            loss, _ = recipe.algorithm.loss(learner.policy, learner.reference, one)
            (len(chosen) / num_trained * loss).backward()
        learner.processes.sum_gradients(learner.parameters)
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in learner.parameters]
        yield k, torch.cat([g.flatten().float() for g in found])
    learner.optimizer.zero_grad(set_to_none=True)


def _keeper(learner: Learner, count: int, seed: int = 0) -> tuple[Callable[[Tensor], Tensor], bool]:
    """Return what is kept of a gradient: all of it, or a projection that keeps products unbiased.

    The projection adds each entry, with a random sign, to one of `PROJECTED` sums.
    """
    size = sum(p.numel() for p in learner.parameters)
    if 4 * size * count <= MOST_BYTES:
        return lambda gradient: gradient.cpu(), False
    generator = torch.Generator().manual_seed(seed)
    place = torch.randint(PROJECTED, (size,), generator=generator)
    sign = torch.randint(2, (size,), generator=generator, dtype=torch.float32) * 2 - 1
    device = learner.parameters[0].device
    place, sign = place.to(device), sign.to(device)

    def project(gradient: Tensor) -> Tensor:
        sums = torch.zeros(PROJECTED, device=gradient.device)
        return sums.index_add(0, place, sign * gradient).cpu()

    return project, True


def _products(gradients: list[dict[int, Tensor]], steps: list[int]) -> Float[Tensor, "B K B K"]:
    """Return all inner products; a step that a batch did not train has the gradient 0."""
    zero = torch.zeros_like(next(iter(gradients[0].values())))
    flat = torch.stack([g.get(k, zero) for g in gradients for k in steps])
    products = torch.stack([flat @ row for row in flat]).double()
    return products.view(len(gradients), len(steps), len(gradients), len(steps))


def _with_error(products: Tensor, weights: Tensor) -> dict[str, float]:
    value, error = jackknife(products, lambda found: signal_to_noise(found, weights))
    return {"signal_to_noise": float(value), "error": float(error)}
