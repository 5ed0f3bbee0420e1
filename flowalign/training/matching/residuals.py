"""Compute the matching residuals of the policy, its reference and its averages."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.functional.noise_matching import space_factor
from flowalign.functional.transition import per_row
from flowalign.training.learner import Learner
from flowalign.training.matching.matching_settings import MatchingSettings
from flowalign.training.matching.state_source import MatchedStates
from flowalign.training.reference import conditional
from flowalign.types import Examples, Policy, Residuals, VelocityField


def add_users(policy: Policy, examples: Examples) -> Examples:
    """Add the users to the conditioning, if the policy is personalised."""
    if not (examples.users and policy.user_conditioning):
        return examples
    cond = policy.user_conditioning.add_users(examples.cond, examples.users)
    return replace(examples, cond=cond)


def select_fields(cfg: MatchingSettings, learner: Learner) -> dict[str, VelocityField]:
    """Return the velocity fields that the loss needs besides the policy, by name."""
    requirements = cfg.loss.requirements
    needed = {
        "reference": cfg.needs_reference,
        "old": requirements.old,
        "anchor": requirements.anchor,
        **dict.fromkeys(cfg.teachers, True),
    }
    return {name: learner.fields[name] for name, wanted in needed.items() if wanted}


def matching_residuals(
    cfg: MatchingSettings,
    policy: Policy,
    states: MatchedStates,
    fields: Mapping[str, VelocityField],
) -> Residuals:
    """Return residuals of the policy and of the fields reference, old and anchor.

    Residuals are in the recipe's space. The targets are the teachers' velocities if the recipe has
    teachers, else the velocities to the data. The policy is evaluated last, because evaluating the
    other fields may swap its weights.
    """
    examples, x, sigma = states.examples, states.x, states.sigma
    if not len(x):  # attention kernels refuse an empty batch
        return Residuals(x, x, x, x, x, sigma, states.transitions)
    teachers = {name: fields[name] for name in cfg.teachers}
    target = teacher_velocity(teachers, states) if teachers else states.target
    factor = per_row(space_factor(cfg.space, sigma), x)
    if examples.weight_map is not None:
        factor = factor * examples.weight_map.sqrt()

    def residual(field: VelocityField) -> Tensor:
        return (conditional(field).velocity(x, sigma, examples.cond) - target) * factor

    reference, old, anchor = (
        residual(fields[name]) if name in fields else None
        for name in ("reference", "old", "anchor")
    )
    given = target * factor
    # The policy comes last: averages swap its weights in place, which would break its graph.
    return Residuals(residual(policy), reference, old, anchor, given, sigma, states.transitions)


def teacher_velocity(
    teachers: Mapping[str, VelocityField], states: MatchedStates
) -> Float[Tensor, "n *latent"]:
    """Return the velocity of each row's teacher; each teacher is evaluated only on its rows."""
    examples, x, sigma = states.examples, states.x, states.sigma
    cond = examples.cond if examples.target_cond is None else examples.target_cond
    if not examples.teachers:
        (teacher,) = teachers.values()
        return conditional(teacher).velocity(x, sigma, cond)
    target = torch.empty_like(x)
    for name, teacher in teachers.items():
        rows = torch.tensor([i for i, own in enumerate(examples.teachers) if own == name])
        if len(rows):
            rows = rows.to(x.device)
            told = {key: value[rows] for key, value in cond.items()}
            target[rows] = conditional(teacher).velocity(x[rows], sigma[rows], told)
    return target


def divergence(residuals: Residuals) -> Float[Tensor, ""]:
    """Return the mean squared difference between the residuals of policy and reference."""
    return (residuals.policy - residuals.required_reference).square().mean()
