"""Builds schedulers, computes size-dependent schedules, and rounds timesteps.

Models with discrete timesteps get flow schedules and velocities.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.functional.diffusion import (
    Prediction,
    even_times,
    flow_sigmas,
    flow_velocity,
    fractional_time,
    preserving_state,
)
from flowalign.utils.imports import LazyModule
from pipelines.network.weights import DTYPES, Precision
from pipelines.parts.libraries import diffusers

_flux = LazyModule("diffusers.pipelines.flux.pipeline_flux")


def build_scheduler(config: Mapping[str, Any]) -> Any:
    """Build the scheduler that a config names."""
    return getattr(diffusers, config["_class_name"]).from_config(config)


def shift_schedule(config: Mapping[str, Any], shift: float | None, path: str) -> Mapping[str, Any]:
    """Return a scheduler's config with another shift, or unchanged if `shift` is None.

    Raises:
        ValueError: The schedule has no shift to set, or computes it from the video's size.
    """
    if shift is None:
        return config
    name = next((n for n in ("flow_shift", "shift") if n in config), None)
    if name is None or config.get("use_dynamic_shifting"):
        raise ValueError(
            f"video.shift is {shift}, but the scheduler of {path} ({config['_class_name']}) "
            + ("computes its shift from the video size" if name else "has none")
            + ": leave it out"
        )
    return {**config, name: shift}


def check_sigmas(compute: Callable[[int], Tensor], num_steps: int, scheduler: str) -> Tensor:
    """Return the sigmas that `compute` returns for `num_steps` steps; `scheduler` names its origin.

    Raises:
        ValueError: It fails, or they are not `num_steps` + 1 finite values that fall from at most 1
            to 0.
    """
    try:
        sigmas = compute(num_steps)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{scheduler} sets no schedule of {num_steps} steps: {error}") from error
    first, falls = float(sigmas[0]), bool((sigmas.diff() < 0).all())
    if first > 1:
        raise ValueError(
            f"{scheduler} has sigmas up to {first:.3g}, but those of a flow are at most 1;\n"
            "UniPC needs use_flow_sigmas and prediction_type flow_prediction"
        )
    if len(sigmas) != num_steps + 1 or not falls or sigmas[-1] != 0:
        shown = ", ".join(f"{x:.3g}" for x in sigmas[:6].tolist())
        raise ValueError(
            f"{scheduler} sets {len(sigmas)} sigmas for {num_steps} steps: {shown}, ...;\n"
            "they must be one more than the steps, and fall from at most 1 to 0"
        )
    return sigmas


def has_whole_times(scheduler: Any) -> bool:
    """Return whether a scheduler's timesteps are integers."""
    probe = build_scheduler(scheduler.config)
    probe.set_timesteps(2, **({"mu": 0.5} if scheduler.config.get("use_dynamic_shifting") else {}))
    return not probe.timesteps.is_floating_point()


def shift_by_size(
    scheduler: Any, num_tokens: int, num_steps: int, even: Sequence[float] | None = None
) -> Tensor:
    """Return the sigmas that a pipeline sets for `num_tokens` tokens; more tokens shift more."""
    names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    mu = _flux.calculate_shift(num_tokens, *(scheduler.config[name] for name in names))
    return shift_sigmas(scheduler, mu, num_steps, even)


def shift_sigmas(
    scheduler: Any, mu: float, num_steps: int, even: Sequence[float] | None = None
) -> Tensor:
    """Return the sigmas that a pipeline sets with the shift `mu`, if its scheduler uses one.

    `even` are the unshifted sigmas, which some pipelines round differently. A single step goes from
    1 to 0, because a scheduler that stretches sigmas to a terminal value could not scale it.
    """
    if num_steps == 1:
        return torch.tensor([1.0, 0.0], dtype=torch.float32)
    even = np.linspace(1.0, 1 / num_steps, num_steps).tolist() if even is None else even
    scheduler.set_timesteps(sigmas=even, mu=mu)
    return scheduler.sigmas.clone()


def round_times(sigma: Tensor, count: int, precision: Precision) -> Tensor:
    """Return one time per sample; 1000 times its value is rounded to the run's precision."""
    return ((sigma * 1000).to(DTYPES[precision]) / 1000).expand(count)


def trailing_sigmas(scheduler: Any, num_steps: int) -> Float[Tensor, "S"]:
    """Return the flow sigmas of evenly spaced timesteps that start at the last one, then 0.

    Raises:
        ValueError: The network predicts something else, or noise where the state is pure noise.
    """
    table, kind = _table(scheduler), scheduler.config.prediction_type
    if kind not in get_args(Prediction) or (kind == "epsilon" and table[-1] == 1):
        raise ValueError(
            f"prediction_type is {kind}, and the last sigma {float(table[-1]):.4g}; supported: "
            "v_prediction and sample, and epsilon for sigmas below 1"
        )
    return torch.cat([table[even_times(num_steps, len(table))], table.new_zeros(1)])


def predict_flow(
    scheduler: Any,
    predict: Callable[[Tensor, Tensor], Tensor],
    x: Float[Tensor, "n *latent"],
    sigma: Float[Tensor, "n"],
) -> Float[Tensor, "n *latent"]:
    """Return the velocity at flow states x.

    `predict` maps diffusion states and timesteps to the network's output.
    """
    times = fractional_time(sigma, _table(scheduler).to(x.device))
    prediction = predict(preserving_state(x, sigma), times)
    return flow_velocity(scheduler.config.prediction_type, prediction, x, sigma)


def _table(scheduler: Any) -> Float[Tensor, "times"]:
    """Return the flow sigma of each timestep, computed in the scheduler's precision."""
    return flow_sigmas(scheduler.alphas_cumprod).float()
