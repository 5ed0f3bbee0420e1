"""Turn noised examples into matching residuals of the policy and of what it is compared with."""

from collections.abc import Mapping
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from flowalign.functional.matching import noised, per_row, space_factor
from flowalign.training.learner import Learner
from flowalign.training.matching.noising import Noised
from flowalign.training.matching.settings import Settings
from flowalign.training.reference import WeightOverride, conditional
from flowalign.types import Examples, Personal, Policy, Residuals, VelocityField

NO_AVERAGES: Mapping[str, VelocityField] = {}
"""Averages that most losses compare the policy with beside the reference: none."""


def personal(policy: Policy, examples: Examples) -> Examples:
    """Add the users to the conditioning, if the policy is personalised."""
    if not (examples.users and isinstance(policy, Personal)):
        return examples
    return replace(examples, cond=policy.with_users(examples.cond, examples.users))


def evaluated_averages(cfg: Settings, learner: Learner) -> dict[str, VelocityField]:
    """Return the averages of the policy that the loss compares it with, by name."""
    requirements = cfg.loss.requirements
    needed = {"old": requirements.old, "anchor": requirements.anchor}
    return {
        name: WeightOverride(learner.policy, learner.averages[name])
        for name, wanted in needed.items()
        if wanted
    }


def matching_residuals(
    cfg: Settings,
    policy: Policy,
    reference: VelocityField | None,
    part: Noised,
    expert: VelocityField | None = None,
    averages: Mapping[str, VelocityField] = NO_AVERAGES,
) -> Residuals:
    """Return residuals in the recipe's space; those of `averages` by their names, old and anchor.

    The policy's are computed last, because other networks may swap its weights.
    """
    examples, (noise, sigma) = part.examples, part.rows()
    x = noised(examples.latents, noise, sigma)
    if not len(x):  # attention kernels refuse an empty batch
        return Residuals(x, x, x, x, x, sigma)
    target = noise - examples.latents
    if expert is not None:
        assert examples.expert_cond is not None, "rows without targets met an expert"
        target = conditional(expert).velocity(x, sigma, examples.expert_cond)
    factor = per_row(space_factor(cfg.space, sigma), x)
    if examples.weight_map is not None:
        factor = factor * examples.weight_map.sqrt()

    def residual(field: VelocityField) -> Tensor:
        return (conditional(field).velocity(x, sigma, examples.cond) - target) * factor

    base = None if reference is None else residual(reference)
    old, anchor = (
        residual(averages[name]) if name in averages else None for name in ("old", "anchor")
    )
    return Residuals(residual(policy), base, old, anchor, target * factor, sigma)


def divergence(residuals: Residuals) -> Float[Tensor, ""]:
    """Return the mean square between the policy's and the reference's velocities, in that space."""
    return (residuals.policy - residuals.required_reference).square().mean()
