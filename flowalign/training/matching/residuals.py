"""Turn examples into matching residuals: one noise and one time per pair, two networks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.functional.matching import noised, per_row, space_factor
from flowalign.training.learner import Learner
from flowalign.training.matching.batches import num_examples, take
from flowalign.training.matching.settings import Settings
from flowalign.training.reference import WeightOverride, conditional
from flowalign.types import Examples, Personal, Policy, Residuals, VelocityField
from flowalign.utils.seeds import generator

NO_AVERAGES: Mapping[str, VelocityField] = {}
"""Averages that most losses compare the policy with beside the reference: none."""


@dataclass(frozen=True)
class Noised:
    """Holds examples with the noise and the times that they are noised by."""

    examples: Examples
    """Clean latents and their labels."""
    noise: Float[Tensor, "m *latent"]
    """Noise of each pair, or sample."""
    sigma: Float[Tensor, "m"]
    """Time of each pair, or sample."""

    def take(self, indices: Int[Tensor, "k"]) -> "Noised":
        """Return the pairs, or samples, with these indices."""
        return Noised(take(self.examples, indices), self.noise[indices], self.sigma[indices])

    def parts(self, size: int) -> Iterator["Noised"]:
        """Yield consecutive parts of at most `size` pairs or samples."""
        for indices in torch.arange(len(self.sigma)).split(size):
            yield self.take(indices)

    def rows(self) -> tuple[Float[Tensor, "n *latent"], Float[Tensor, "n"]]:
        """Return noise and sigma of every row; both rows of a pair have the pair's."""
        copies = 2 if self.examples.paired else 1
        return torch.cat([self.noise] * copies), torch.cat([self.sigma] * copies)


def noise_for(
    cfg: Settings, policy: Policy, examples: Examples, first: int, key: tuple[int, ...]
) -> Noised:
    """Draw noise and times; `first` is the position of the first example among all processes'.

    Draws depend on that position and on `key`, not on the process that makes them.
    """
    seed, *index = key
    shape, latents = examples.latents.shape[1:], examples.latents
    generators = [
        generator(seed, "match", *index, first + i) for i in range(num_examples(examples))
    ]
    if not generators:
        return Noised(examples, latents.new_zeros(0, *shape), latents.new_zeros(0))
    sigma = torch.cat([cfg.times.draw(1, policy, g) for g in generators])
    noise = torch.stack([torch.randn(shape, generator=g) for g in generators])
    return Noised(examples, noise.to(latents.device), sigma.to(latents.device))


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
