"""Compute the matching residuals of the policy, its reference and its averages, and their norms."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.functional.forward_process import norm_ratio
from flowalign.functional.noise_matching import space_factor
from flowalign.functional.transition import per_row
from flowalign.training.learner import Learner
from flowalign.training.matching.matching_settings import MatchingSettings
from flowalign.training.reference import conditional
from flowalign.types import Batch, Policy, VelocityField
from flowalign.types.losses import FIELDS


def select_fields(cfg: MatchingSettings, learner: Learner) -> dict[str, VelocityField]:
    """Return the velocity fields that the loss needs besides the policy, by name."""
    reference = {"reference"} if cfg.needs_reference else set()
    needed = [name for name in FIELDS if name in cfg.loss.needs | reference]
    return {name: learner.fields[name] for name in (*needed, *cfg.teachers)}


def matching_residuals(
    cfg: MatchingSettings,
    policy: Policy,
    states: Batch,
    fields: Mapping[str, VelocityField],
) -> Batch:
    """Return states with residuals of the policy and of the fields reference, old and anchor.

    Residuals are in the recipe's space. The targets are the teachers' velocities if the recipe has
    teachers, else the velocities to the data. The policy is evaluated last, because evaluating the
    other fields may swap its weights.
    """
    x: Tensor = states["x"]
    sigma = states["sigma"]
    others = {name: field for name, field in fields.items() if name in FIELDS}
    if not len(x):  # attention kernels refuse an empty batch
        return states.with_columns(policy=x, **dict.fromkeys(others, x))
    teachers = {name: fields[name] for name in cfg.teachers}
    target = teacher_velocity(teachers, states) if teachers else states["target"]
    factor = per_row(space_factor(cfg.space, sigma), x)
    if "weight_map" in states:
        factor = factor * states["weight_map"].sqrt()

    def residual(field: VelocityField) -> Tensor:
        return (conditional(field).velocity(x, sigma, states["cond"]) - target) * factor

    found = {name: residual(field) for name, field in others.items()}
    # The policy comes last: averages swap its weights in place, which would break its graph.
    return states.with_columns(policy=residual(policy), target=target * factor, **found)


def teacher_velocity(
    teachers: Mapping[str, VelocityField], states: Batch
) -> Float[Tensor, "n *latent"]:
    """Return the velocity of each row's teacher; each teacher is evaluated only on its rows."""
    x, sigma, cond = states["x"], states["sigma"], states.get("target_cond", states["cond"])
    if "teacher" not in states:
        (teacher,) = teachers.values()
        return conditional(teacher).velocity(x, sigma, cond)
    target = torch.empty_like(x)
    for name, teacher in teachers.items():
        rows = torch.tensor([i for i, own in enumerate(states["teacher"]) if own == name])
        if len(rows):
            rows = rows.to(x.device)
            told = {key: value[rows] for key, value in cond.items()}
            target[rows] = conditional(teacher).velocity(x[rows], sigma[rows], told)
    return target


def divergence(states: Batch) -> Float[Tensor, ""]:
    """Return the mean squared difference between the residuals of policy and reference."""
    return (states["policy"] - states["reference"]).square().mean()


_THIRDS = {"low": (0.0, 1 / 3), "middle": (1 / 3, 2 / 3), "high": (2 / 3, torch.inf)}
_RATIO, _ROWS = "norm_ratio/", "norm_rows/"


@torch.no_grad()
def norm_ratios(rows: Batch) -> dict[str, Tensor]:
    """Return sums of ||v|| / ||v_ref|| and row counts, for each third of the noise level range.

    Losses that push away from samples make the norm grow, which leads to over-saturation.

    Both are divided by the number of all rows, so that they add up over micro-batches. The result
    is empty if the reference is not evaluated.
    """
    if "reference" not in rows or not rows.num_rows:
        return {}
    target, sigma = rows["target"], rows["sigma"]
    ratio = norm_ratio(rows["policy"] + target, rows["reference"] + target)
    found = {}
    for name, (low, high) in _THIRDS.items():
        inside = ((sigma >= low) & (sigma < high)).to(ratio)
        found[_RATIO + name] = (ratio * inside).mean()
        found[_ROWS + name] = inside.mean()
    return found


def means_by_third(metrics: Mapping[str, float]) -> dict[str, float]:
    """Divide the sums of `norm_ratios` by the row counts, and drop thirds without rows."""
    found = {name: value for name, value in metrics.items() if not name.startswith(_ROWS)}
    for name in _THIRDS:
        total, rows = found.pop(_RATIO + name, 0.0), metrics.get(_ROWS + name, 0.0)
        if rows:
            found[_RATIO + name] = total / rows
    return found
