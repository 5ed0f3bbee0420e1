"""Noise clean latents of pairs or samples to one or several noise levels."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.functional.noise_matching import step_at
from flowalign.training.matching.example_parts import num_examples, take
from flowalign.training.matching.matching_settings import MatchingSettings
from flowalign.training.matching.source import StepAdvantages
from flowalign.training.matching.state_source import NoisedExamples
from flowalign.training.matching.visited import noise_of, transitions_from
from flowalign.types import Examples, Policy, Trajectory
from flowalign.utils.seeds import generator


@dataclass(frozen=True)
class NoiseLevels:
    """Noise levels of examples; an example may have several or none."""

    examples: Examples
    """Clean latents and their labels, once each."""
    index: Int[Tensor, "m"]
    """Index of the example (pair or sample) of each noise level."""
    level: Int[Tensor, "m"]
    """Index of each noise level among the levels of its example."""
    noise: Float[Tensor, "m *latent"]
    """Noise of each level."""
    sigma: Float[Tensor, "m"]
    """Time of each level."""
    num_levels: int = 1
    """Number of noise levels drawn per example; some of them may be dropped."""
    steps: StepAdvantages | None = None
    """Advantages or weights of denoising steps. If set, an example has the advantage or weight of
    the step at its noise level."""
    uniform: Float[Tensor, "m K"] | None = None
    """Random numbers in [0, 1) for the state source at each level; None if it needs none."""
    visited: Trajectory | None = None
    """Trajectories of the examples, with visited states to match instead of noised latents."""

    def __len__(self) -> int:
        """Return the total number of noise levels."""
        return len(self.sigma)

    @property
    def group(self) -> Int[Tensor, "m"]:
        """Return the id of each row's comparison group, which is a group at one noise level."""
        assert self.examples.group is not None, "samples without groups are not compared"
        return self.examples.group.cpu()[self.index] * self.num_levels + self.level

    def take(self, indices: Int[Tensor, "k"]) -> NoisedExamples:
        """Return examples at the noise levels with these indices."""
        index, sigma = self.index[indices], self.sigma[indices]
        examples = take(self.examples, index)
        if examples.group is not None:
            examples = replace(examples, group=self.group[indices].to(examples.latents.device))
        if self.steps is not None and len(index):
            examples = _of_steps(examples, self.steps, index, sigma)
        noise, transitions = self.noise[indices], None
        if self.visited is not None:
            noise = noise_of(self.visited, index, sigma)
            transitions = transitions_from(self.visited, index, sigma)
        uniform = None if self.uniform is None else self.uniform[indices]
        return NoisedExamples(examples, noise, sigma, uniform, transitions)

    def all(self) -> NoisedExamples:
        """Return all examples at all their noise levels."""
        return self.take(torch.arange(len(self)))

    def parts(self, size: int) -> Iterator[NoisedExamples]:
        """Yield consecutive parts of at most `size` noise levels."""
        for indices in torch.arange(len(self)).split(size):
            yield self.take(indices)


def noise_for(
    cfg: MatchingSettings,
    policy: Policy,
    examples: Examples,
    first: int,
    key: tuple[int, ...],
    steps: StepAdvantages | None = None,
    visited: Trajectory | None = None,
) -> NoiseLevels:
    """Draw noise and times; `first` is the global position of this process's first example.

    Draws depend on `key` and on the global position of an example, or on its group if the loss
    compares groups. They do not depend on the process. Levels of untrained denoising steps are
    dropped.
    """
    latents, count, levels = examples.latents, num_examples(examples), cfg.times_per_sample
    shape, device = latents.shape[1:], latents.device
    groups = [None] * count
    if cfg.loss.requirements.whole_groups:
        assert examples.group is not None, "the recipe is refused without groups"
        groups = examples.group.tolist()
    drawn = [_draws(cfg, policy, shape, first + i, group, key) for i, group in enumerate(groups)]
    empty = torch.zeros(0), torch.zeros(0, *shape), torch.zeros(0, cfg.states.draws)
    sigma, noise, uniform = (torch.cat(all_of) for all_of in zip(empty, *drawn, strict=True))
    index = torch.arange(count).repeat_interleave(levels)
    level = torch.arange(levels).repeat(count)
    if steps is not None:
        kept = steps.trained[index, step_at(sigma, steps.sigmas)]
        index, level, noise, sigma = index[kept], level[kept], noise[kept], sigma[kept]
        uniform = uniform[kept]
    drawn_by_states = uniform.to(device) if cfg.states.draws else None
    return NoiseLevels(
        examples,
        index,
        level,
        noise.to(device),
        sigma.to(device),
        levels,
        steps,
        drawn_by_states,
        visited,
    )


def _draws(
    cfg: MatchingSettings,
    policy: Policy,
    shape: torch.Size,
    position: int,
    group: int | None,
    key: tuple[int, ...],
) -> tuple[Float[Tensor, "k"], Float[Tensor, "k *latent"], Float[Tensor, "k K"]]:
    """Return the times, the noises and the numbers for the state source of an example.

    A group shares its times, and its noises if the loss requires shared noise.
    """
    seed, *index = key
    own = generator(seed, "match", *index, position)
    shared = own if group is None else generator(seed, "match_group", *index, group)
    sigma = cfg.times.draw(cfg.times_per_sample, policy, shared)
    source = shared if cfg.loss.requirements.shared_noise else own
    # Draw times, then noise, then uniform numbers: changing the order changes seeded runs.
    noise = torch.randn(cfg.times_per_sample, *shape, generator=source)
    return sigma, noise, torch.rand(cfg.times_per_sample, cfg.states.draws, generator=own)


def _of_steps(
    examples: Examples,
    steps: StepAdvantages,
    index: Int[Tensor, "k"],
    sigma: Float[Tensor, "k"],
) -> Examples:
    """Return examples with the advantages or weights of the steps at their noise levels."""
    k = step_at(sigma.cpu(), steps.sigmas)
    if steps.weight is not None:
        factor = steps.weight[index, k].repeat(2 if examples.paired else 1)
        examples = replace(examples, weight=examples.weight * factor.to(examples.weight))
    if steps.advantage is None:
        return examples
    advantage, latents = steps.advantage[index, k], examples.latents
    if steps.completed:
        latents = torch.stack(
            [steps.completed[j][i] for i, j in zip(index.tolist(), k.tolist(), strict=True)]
        )
    places = None if steps.places is None else steps.places[index, k].to(examples.weight)
    return replace(
        examples,
        latents=latents.to(examples.latents),
        places=places,
        advantage=advantage.to(examples.weight),
        desirable=(advantage > 0).to(examples.desirable.device),
    )
