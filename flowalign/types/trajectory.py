"""Define trajectories, and how their states are completed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowalign.functional.transition import Kernel
from flowalign.types.request import Request, prompts_of
from flowalign.utils.ranges import PositiveInt, Settings


@dataclass(frozen=True, kw_only=True)
class Completion(Settings, key="completion"):
    """Settings of the ODE that completes an intermediate state."""

    max_steps: PositiveInt | None = None
    """Largest number of ODE steps. Null: every remaining step (DenseGRPO, TP-GRPO). 1: one-step
    prediction of the data. m: m about evenly spaced steps (Stepwise-Flow-GRPO uses 5)."""
    stride: PositiveInt = 1
    """Stride over the schedule points, after a first step of one point (G2RPO's granularity). 1:
    every point."""
    guidance: Literal["same", "off"] = "same"
    """Guidance of the ODE. same: as in the rollout. off: no classifier-free guidance, at half the
    network evaluations."""
    weights: Literal["policy", "ema", "reference"] = "policy"
    """Weights that drive the ODE. Only `policy` with guidance `same` is batched with the rollout,
    which saves one evaluation per state."""

    @property
    def follows_rollout(self) -> bool:
        """Return whether completions use the same velocity field as the rollout."""
        return self.guidance == "same" and self.weights == "policy"

    def path(self, k: int, num_steps: int) -> list[int]:
        """Return the schedule indices that a completion visits, from k to num_steps."""
        if k >= num_steps:
            return [num_steps]
        points = [k, *range(k + 1, num_steps, self.stride), num_steps]
        hops = len(points) - 1
        if self.max_steps is None or hops <= self.max_steps:
            return points
        return [points[round(i * hops / self.max_steps)] for i in range(self.max_steps + 1)]

    def num_evaluations(self, k: int, num_steps: int) -> int:
        """Return the network evaluations per state k, less the first if the rollout shares it."""
        hops = len(self.path(k, num_steps)) - 1
        return hops - 1 if self.follows_rollout and hops else hops


Cond = Mapping[str, Tensor]
"""Conditioning in the format of a policy. Every tensor has a leading sample axis."""


@dataclass(frozen=True)
class SharedRows:
    """Index of shared states, so that a shared state is computed and stored once.

    Samples of a tree are one row until they split. State k of sample b was computed by sample
    `source_row[b, k]`, and samples with equal entries share state k and every earlier state.
    Tensors of shared rows may live on any device; the indices stay on the CPU.
    """

    source_row: Int[Tensor, "B S"]
    """Index of the sample that computed state k of sample b."""
    noise_row: Int[Tensor, "B T"] | None = None
    """Index of the sample whose noise sample b uses at step k. None: its own."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.source_row)

    def unique_rows(self, k: int) -> Int[Tensor, "n"]:
        """Return the indices of the distinct rows of state k.

        Samples that share a prefix share a row.
        """
        source = self.source_row[:, k]
        return (source == torch.arange(len(source))).nonzero().flatten()

    def row_index(self, k: int) -> Int[Tensor, "B"]:
        """Return the position of each sample's state k in `unique_rows(k)`."""
        return torch.searchsorted(self.unique_rows(k), self.source_row[:, k].contiguous())

    def select(self, x: Float[Tensor, "B *rest"], k: int) -> Float[Tensor, "n *rest"]:
        """Return the distinct rows of state k, given one row per sample."""
        return x[self.unique_rows(k).to(x.device)]

    def expand(self, x: Float[Tensor, "n *rest"], k: int) -> Float[Tensor, "B *rest"]:
        """Return one row per sample, given the distinct rows of state k."""
        return x[self.row_index(k).to(x.device)]

    def share(self, x: Float[Tensor, "B *rest"], k: int) -> Float[Tensor, "B *rest"]:
        """Give every sample the row of the sample that computed its state k."""
        return x[self.source_row[:, k].to(x.device)]

    def share_noise(self, noise: Float[Tensor, "B *rest"], k: int) -> Float[Tensor, "B *rest"]:
        """Give every sample the noise that it uses at step k."""
        return noise if self.noise_row is None else noise[self.noise_row[:, k].to(noise.device)]

    @property
    def owned(self) -> Bool[Tensor, "B T"]:
        """Return True for transitions that a sample made itself, with its own noise."""
        sample = torch.arange(len(self.source_row))[:, None]
        made = self.source_row[:, 1:] == sample
        return made if self.noise_row is None else made & (self.noise_row == sample)

    def repeat(self, copies: int) -> "SharedRows":
        """Return `copies` independent copies of the index, concatenated."""
        return SharedRows.concat([self] * copies)

    @staticmethod
    def concat(parts: Sequence["SharedRows"]) -> "SharedRows":
        """Return the concatenation of several indices, without sharing between them."""
        starts = torch.tensor([0, *(len(part) for part in parts[:-1])]).cumsum(0).tolist()
        placed = list(zip(parts, starts, strict=True))
        noise = [p.noise_row + start for p, start in placed if p.noise_row is not None]
        return SharedRows(
            torch.cat([p.source_row + start for p, start in placed]),
            torch.cat(noise) if noise else None,
        )


@dataclass(frozen=True)
class Trajectory:
    """B denoising trajectories with one schedule, sampled by the old policy."""

    logp: Float[Tensor, "B T"]
    """log pi_old(x_{k+1} | x_k), averaged over latent elements; 0 on deterministic steps."""
    states: Mapping[int, Float[Tensor, "_ *latent"]]
    """Stored states by index, one row per distinct state, in the dtype from which `logp` was
    computed. `state` and `unique_states` read them."""
    sigmas: Float[Tensor, "T+1"]
    """Schedule that all samples share, decreasing to 0."""
    eta: Float[Tensor, "B T"]
    """Noise level of each transition; 0 marks an ODE step, which carries no gradient."""
    kernel: Kernel
    """Transition family that drew the states; losses must replay the same family."""
    cond: Cond
    """Conditioning, one row per request; sample b uses row b // group_size."""
    requests: Sequence[Request]
    """Request of each sample."""
    group_size: int
    """Number G of samples per request."""
    rows: SharedRows
    """Index of the states that samples share."""
    graphs: dict[int, list[Float[Tensor, "_ *latent"]]] = field(default_factory=dict)
    """Velocities of distinct states with the graphs of the rollout, by step and network call. The
    update reads them once; empty unless it does."""
    means: Mapping[int, Float[Tensor, "B *latent"]] = field(default_factory=dict)
    """Means of the old transitions by step; empty unless a loss needs `mean_old`."""
    untrained: Sequence[int] = ()
    """Indices of the stochastic steps that are not trained."""
    finished: Mapping[tuple[int, Completion], Float[Tensor, "n *latent"]] = field(
        default_factory=dict
    )
    """Clean latents of the states that were completed during the rollout, one row per distinct
    state."""
    hidden: Mapping[int, Float[Tensor, "n D"]] = field(default_factory=dict)
    """Denoiser features of the states that the credit method observes, one row per distinct state.
    `features` reads them."""

    @property
    def prompts(self) -> list[str]:
        """Return the prompt of each sample, for logs."""
        return prompts_of(self.requests)

    @property
    def num_steps(self) -> int:
        """Return T, the number of transitions."""
        return self.logp.shape[1]

    @property
    def prompt(self) -> Int[Tensor, "B"]:
        """Return the index of each sample's prompt."""
        return torch.arange(len(self.logp)) // self.group_size

    @property
    def device(self) -> torch.device:
        """Return the device of the policy; states may be stored on another device."""
        return self.logp.device

    def unique_states(self, k: int) -> Float[Tensor, "n *latent"]:
        """Return state k in float32, one row per distinct state.

        Raises:
            ValueError: The rollout did not store this state.
        """
        return self._kept(k).to(self.device).float()

    def state(
        self, k: int, samples: Int[Tensor, "n"] | slice = slice(None)
    ) -> Float[Tensor, "n *latent"]:
        """Return state k of `samples` in float32.

        Raises:
            ValueError: The rollout did not store this state.
        """
        kept = self._kept(k)
        index = self.rows.row_index(k)[samples]
        return kept[index.to(kept.device)].to(self.device).float()

    def features(self, k: int) -> Float[Tensor, "B D"]:
        """Return the input of the denoiser's last layer at state k, averaged over its positions.

        The features cost a credit method no extra evaluation; they depend on prompt and guidance.

        Raises:
            ValueError: The rollout did not store the features of this state.
        """
        if k not in self.hidden:
            raise ValueError(
                f"features of state {k} were not stored; the rollout stored the states "
                f"{sorted(self.hidden)} that credit observes in a trajectory of zeros"
            )
        return self.rows.expand(self.hidden[k], k)

    def mean(self, k: int, samples: Int[Tensor, "n"]) -> Float[Tensor, "n *latent"] | None:
        """Return the mean of transition k of `samples`; None if no loss needs means."""
        if k not in self.means:
            return None
        return self.means[k][samples.to(self.means[k].device)].to(self.device)

    @property
    def trained(self) -> Bool[Tensor, "B T"]:
        """Return True for trained stochastic transitions.

        A shared transition is True only for the sample that made it.
        """
        chosen = self.rows.owned & (self.eta > 0).cpu()
        chosen[:, list(self.untrained)] = False
        return chosen

    @property
    def shared(self) -> Bool[Tensor, "B T"]:
        """Return True for stochastic transitions that another sample made."""
        return ~self.rows.owned & (self.eta > 0).cpu()

    def _kept(self, k: int) -> Float[Tensor, "n *latent"]:
        if k not in self.states:
            raise ValueError(
                f"state {k} was not stored; the trajectory stored states {sorted(self.states)}: "
                "the window, the last,\nand the states that credit reads in a trajectory of zeros"
            )
        return self.states[k]


def prompt_step_ids(trajectory: Trajectory) -> Int[Tensor, "B T"]:
    """Return the id prompt * T + k: samples of a prompt are compared at equal steps only."""
    num_samples, num_steps = trajectory.logp.shape
    prompt = torch.arange(num_samples) // trajectory.group_size
    return prompt[:, None] * num_steps + torch.arange(num_steps)


def sibling_ids(trajectory: Trajectory) -> Int[Tensor, "B T"]:
    """Return ids that are equal for transitions from the same state."""
    steps = torch.arange(trajectory.num_steps)
    return trajectory.rows.source_row[:, :-1] * trajectory.num_steps + steps


CompletionRequest = tuple[int, Completion]
"""Index of a state, and the method of its completion."""


def take_rows(cond: Cond, rows: Int[Tensor, "n"]) -> dict[str, Tensor]:
    """Return the given rows of every conditioning tensor."""
    return {name: value[rows] for name, value in cond.items()}
