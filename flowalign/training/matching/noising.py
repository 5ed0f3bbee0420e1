"""Noise clean latents of pairs or samples to one or several noise levels."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.functional.noise_matching import step_at
from flowalign.training.matching.example_parts import num_examples, of_rows, take
from flowalign.training.matching.matching_settings import MatchingSettings
from flowalign.training.matching.source import StepAdvantages
from flowalign.training.matching.visited import noise_of, steps_from
from flowalign.types import Batch, Policy, Trajectory
from flowalign.utils.seeds import generator


@dataclass(frozen=True)
class NoiseLevels:
    """Noise levels of examples; an example may have several or none."""

    examples: Batch
    """Clean latents and their labels, once each."""
    index: Int[Tensor, "m"]
    """Index of the example (pair or sample) of each noise level."""
    level: Int[Tensor, "m"]
    """Index of each noise level among the levels of its example."""
    noise: Float[Tensor, "m *latent"]
    """Noise of each level."""
    sigma: Float[Tensor, "m"]
    """Time of each level."""
    uniform: Float[Tensor, "m K"]
    """Random numbers in [0, 1) for the state source at each level."""
    num_levels: int = 1
    """Number of noise levels drawn per example; some of them may be dropped."""
    steps: StepAdvantages | None = None
    """Advantages or weights of denoising steps. If set, an example has the advantage or weight of
    the step at its noise level."""
    visited: Trajectory | None = None
    """Trajectories of the examples, with visited states to match instead of noised latents."""

    def __len__(self) -> int:
        """Return the total number of noise levels."""
        return len(self.sigma)

    @property
    def group(self) -> Int[Tensor, "m"]:
        """Return the id of each row's comparison group, which is a group at one noise level."""
        return self.examples["group"].cpu()[self.index] * self.num_levels + self.level

    def take(self, indices: Int[Tensor, "k"]) -> Batch:
        """Return examples at the noise levels with these indices."""
        index, sigma, noise = self.index[indices], self.sigma[indices], self.noise[indices]
        rows = take(self.examples, index)
        if "group" in rows:
            rows = rows.with_columns(group=self.group[indices].to(noise.device))
        if self.steps is not None:
            rows = _of_steps(rows, self.steps, index, sigma)
        if self.visited is not None:
            noise = noise_of(self.visited, index, sigma)
            rows = rows.with_columns(**steps_from(self.visited, index, sigma))
        drawn = {"noise": noise, "sigma": sigma, "uniform": self.uniform[indices]}
        return rows.with_columns(**{name: of_rows(rows, each) for name, each in drawn.items()})

    def all(self) -> Batch:
        """Return all examples at all their noise levels."""
        return self.take(torch.arange(len(self)))

    def parts(self, size: int) -> Iterator[Batch]:
        """Yield consecutive parts of at most `size` noise levels."""
        for indices in torch.arange(len(self)).split(size):
            yield self.take(indices)


def noise_for(
    cfg: MatchingSettings,
    policy: Policy,
    examples: Batch,
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
    latents, count, levels = examples["latents"], num_examples(examples), cfg.times_per_sample
    shape, device = latents.shape[1:], latents.device
    groups = [None] * count
    if "group" in cfg.loss.needs:
        groups = examples["group"].tolist()
    drawn = [_draws(cfg, policy, shape, first + i, group, key) for i, group in enumerate(groups)]
    empty = torch.zeros(0), torch.zeros(0, *shape), torch.zeros(0, cfg.states.draws)
    sigma, noise, uniform = (torch.cat(all_of) for all_of in zip(empty, *drawn, strict=True))
    index = torch.arange(count).repeat_interleave(levels)
    level = torch.arange(levels).repeat(count)
    if steps is not None:
        kept = steps.trained[index, step_at(sigma, steps.sigmas)]
        index, level, noise, sigma = index[kept], level[kept], noise[kept], sigma[kept]
        uniform = uniform[kept]
    noise, sigma, uniform = noise.to(device), sigma.to(device), uniform.to(device)
    return NoiseLevels(examples, index, level, noise, sigma, uniform, levels, steps, visited)


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
    source = shared if cfg.loss.shared_noise else own
    # Draw times, then noise, then uniform numbers: changing the order changes seeded runs.
    noise = torch.randn(cfg.times_per_sample, *shape, generator=source)
    return sigma, noise, torch.rand(cfg.times_per_sample, cfg.states.draws, generator=own)


def _of_steps(
    examples: Batch, steps: StepAdvantages, index: Int[Tensor, "k"], sigma: Float[Tensor, "k"]
) -> Batch:
    """Return examples with the advantages or weights of the steps at their noise levels."""
    k, weight = step_at(sigma.cpu(), steps.sigmas), examples["weight"]
    if steps.weight is not None:
        factor = of_rows(examples, steps.weight[index, k])
        return examples.with_columns(weight=weight * factor.to(weight))
    assert steps.advantage is not None, "steps have advantages or weights"
    advantage, found = steps.advantage[index, k].to(weight), dict[str, Tensor]()
    if steps.completed and len(index):
        places = zip(index.tolist(), k.tolist(), strict=True)
        completed = torch.stack([steps.completed[j][i] for i, j in places])
        found["latents"] = completed.to(examples["latents"])
    if steps.places is not None:
        found["places"] = steps.places[index, k].to(weight)
    return examples.with_columns(advantage=advantage, desirable=advantage > 0, **found)
