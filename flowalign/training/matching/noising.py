"""Noise clean latents of pairs or samples, and divide their noise levels into updates."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.distributed.processes import Processes
from flowalign.functional.noise_matching import step_at, velocity_to_data
from flowalign.functional.transition import mean_sensitivity, transition, travelled_velocity
from flowalign.training.matching.matching_settings import MatchingSettings
from flowalign.training.matching.source import StepAdvantages
from flowalign.types import Batch, Policy, Trajectory
from flowalign.types.batch import Values
from flowalign.utils.seeds import generator


def num_examples(examples: Batch) -> int:
    """Return the number of pairs, or of samples if there are no pairs."""
    return examples.num_rows // 2 if "pair" in examples else examples.num_rows


def pairs_of(columns: Mapping[str, Values]) -> Batch:
    """Return pairs of weight 1, from columns of the winners followed by the losers."""
    rows = Batch(columns)
    count = rows.num_rows // 2
    return rows.with_columns(
        pair=torch.arange(count).repeat(2),
        desirable=torch.arange(2 * count) < count,
        weight=torch.ones(2 * count),
    )


def take(examples: Batch, indices: Int[Tensor, "k"]) -> Batch:
    """Return the pairs, or samples, with these indices."""
    losers = [indices + num_examples(examples)] if "pair" in examples else []
    return examples.take(torch.cat([indices, *losers]))


def of_rows(examples: Batch, values: Tensor) -> Tensor:
    """Return the values of pairs, or samples, for each row."""
    return torch.cat([values, values]) if "pair" in examples else values


def prepare(examples: Batch, policy: Policy, device: torch.device) -> Batch:
    """Return examples on a device, with float32 latents and users in their conditioning."""
    rows = examples.to(device)
    rows = rows.with_columns(latents=rows["latents"].float())
    if "user" not in rows or not policy.user_conditioning:
        return rows
    return rows.with_columns(cond=policy.user_conditioning.add_users(rows["cond"], rows["user"]))


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

    def rows(self, indices: Int[Tensor, "k"] | None = None) -> Batch:
        """Return one row for each of some noise levels, or of all, which `take` fills."""
        row = torch.arange(len(self)) if indices is None else indices
        group = {"group": self.group[row]} if "group" in self.examples else {}
        return Batch({"row": row, **group})


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
    empty = torch.zeros(0), torch.zeros(0, *shape), torch.zeros(0, cfg.states.rows - 1)
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
    return sigma, noise, torch.rand(cfg.times_per_sample, cfg.states.rows - 1, generator=own)


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


def divide_updates(
    levels: NoiseLevels,
    num_updates: int,
    grouped: bool,
    first: int,
    processes: Processes,
    draw: torch.Generator,
) -> Iterator[tuple[Batch, int]]:
    """Yield this process's rows of each update, in random order, and the rows of all processes.

    All noise levels of an example are in the same update and, if `grouped` is set, all examples of
    a group. `first` is the position of this process's first example.
    """
    unit = first + levels.index
    if grouped:
        unit = levels.examples["group"].cpu()[levels.index]
    present, everywhere = processes.gather(unit).unique(return_inverse=True)
    place = torch.randperm(len(present), generator=draw).argsort()
    everywhere, at = place[everywhere], place[torch.searchsorted(present, unit)]
    order = at.argsort(stable=True)
    for places in torch.arange(len(present)).tensor_split(min(num_updates, max(len(present), 1))):
        total = int(torch.isin(everywhere, places).sum())
        if total:
            yield levels.rows(order[torch.isin(at[order], places)]), total


def noise_of(
    trajectory: Trajectory, samples: Int[Tensor, "m"], sigma: Float[Tensor, "m"]
) -> Float[Tensor, "m *latent"]:
    """Return the noise that turns each sample into its visited state at sigma.

    From x = (1 - sigma) x0 + sigma noise follows noise = x0 + (x - x0) / sigma.
    """
    x0 = trajectory.state(trajectory.num_steps, samples)
    x = torch.empty_like(x0)
    for k, rows in _by_step(trajectory, sigma):
        x[rows] = trajectory.state(k, samples[rows])
    return x0 + velocity_to_data(x, x0, sigma.to(x))


def steps_from(
    trajectory: Trajectory, samples: Int[Tensor, "m"], sigma: Float[Tensor, "m"]
) -> dict[str, Tensor]:
    """Return columns of the sampled steps at the given levels; none if one was deterministic.

    The mean of a step is linear in the velocity: mean_a - mean_b = slope * (v_a - v_b).
    """
    steps = list(_by_step(trajectory, sigma))
    if not all(bool((trajectory.eta[samples[rows], k] > 0).all()) for k, rows in steps):
        return {}
    x0 = trajectory.state(trajectory.num_steps, samples)
    travelled, numbers = torch.empty_like(x0), x0.new_empty(4, len(x0))
    kernel, sigmas = trajectory.kernel, trajectory.sigmas
    for k, rows in steps:
        some = samples[rows]
        eta = trajectory.eta[some.to(trajectory.eta.device), k]
        x, x_next = trajectory.state(k, some), trajectory.state(k + 1, some)
        travelled[rows] = travelled_velocity(kernel, x, x_next, sigmas, k, eta)
        std = transition(kernel, x, torch.zeros_like(x), sigmas, k, eta).std
        slope = mean_sensitivity(kernel, sigmas, k, eta)
        dt = (sigmas[k] - sigmas[k + 1]).expand_as(std)
        numbers[:, rows] = torch.stack([slope, std, dt, trajectory.logp[some, k].to(std)])
    names = "slope", "std", "dt", "logp_old"
    return {"travelled": travelled, **dict(zip(names, numbers, strict=True))}


def _by_step(
    trajectory: Trajectory, sigma: Float[Tensor, "m"]
) -> Iterator[tuple[int, Int[Tensor, "_"]]]:
    """Yield each denoising step that starts at one of the levels, and its rows."""
    at = step_at(sigma.cpu(), trajectory.sigmas.cpu())
    for k in at.unique().tolist():
        yield k, (at == k).nonzero()[:, 0]
