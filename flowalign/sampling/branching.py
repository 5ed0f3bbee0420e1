"""Arrange the samples of a prompt into chains, trees or combs that share states."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from flowalign.types import SharedRows
from flowalign.utils.ranges import NonNegativeInt, PositiveFloat, Range, Settings

Children = Annotated[int, Range(least=2, most=100_000)]
"""Number of states that one state splits into."""


@dataclass(frozen=True)
class BranchLayout:
    """Arrangement of the G samples of one prompt, made before any sample is drawn."""

    eta: Float[Tensor, "G T"]
    """Noise level of each transition; 0 is an ODE step."""
    rows: SharedRows
    """Mapping from each of the G samples to the sample that holds its state."""


class Branching(ABC):
    """Arrangement of the samples that start from one initial noise."""

    sibling_noise_scale: float | None = None
    """Scale of a sibling's individual noise relative to the noise that siblings share. Null: no
    shared noise."""

    @abstractmethod
    def seed_layout(self, num_samples: int, eta: Float[Tensor, "T"]) -> BranchLayout:
        """Return the layout of the samples of one initial noise.

        `eta` holds the noise levels of the window, and 0 outside it.

        Raises:
            ValueError: The arrangement needs another number of samples.
        """


@dataclass(frozen=True)
class Chain(Branching):
    """Independent chains, which share only the states before the first stochastic step."""

    @override
    def seed_layout(self, num_samples: int, eta: Float[Tensor, "T"]) -> BranchLayout:
        """Return chains that share their states up to the first stochastic step."""
        below = _leaves_below(num_samples, num_samples, len(eta), _stochastic_steps(eta)[:1])
        return BranchLayout(eta.expand(num_samples, -1), _shared_rows(num_samples, below))


@dataclass(frozen=True, kw_only=True)
class Tree(Branching, Settings, key="branching"):
    """Tree that splits every state into `children` states at some steps.

    Sources: BranchGRPO, arXiv:2509.06040v5, splits at steps 0, 3, 6, 9; TreeGRPO, arXiv:2512.08153,
    uses three children at each of three steps. Noise that grows with the depth follows
    Dynamic-TreeRPO, arXiv:2509.23352v3. Its formula is not public. Our reconstruction is
    eta (1 + growth * depth / (levels - 1)).
    """

    splits: Sequence[NonNegativeInt] | None = None
    """Indices of the steps at which to split. Null: every step of the window."""
    children: Children = 2
    """Number of states that each state splits into, at least 2."""
    growth: Annotated[float, Range(above=-1)] = 0.0
    """Relative increase of the noise level from the first to the deepest split, above -1."""
    sibling_noise_scale: PositiveFloat | None = None
    """Scale s of a sibling's individual noise: siblings draw (shared + s * individual) /
    sqrt(1 + s^2). This keeps each draw a standard normal, while the released code rescales the
    noise. BranchGRPO: 4. Null: no shared noise."""

    @override
    def seed_layout(self, num_samples: int, eta: Float[Tensor, "T"]) -> BranchLayout:
        """Return a tree with children^levels leaves."""
        splits = _split_steps(self.splits, eta)
        leaves = self.children ** len(splits)
        _require_samples(f"tree with {self.children} children at {splits}", leaves, num_samples)
        depth = torch.tensor([sum(s < k for s in splits) for k in range(len(eta))])
        louder = 1 + self.growth * depth.clamp(max=len(splits) - 1) / max(len(splits) - 1, 1)
        below = _leaves_below(num_samples, self.children, len(eta), splits)
        return BranchLayout(
            (eta * louder).expand(num_samples, -1), _shared_rows(num_samples, below)
        )


@dataclass(frozen=True, kw_only=True)
class Comb(Branching, Settings, key="branching"):
    """Comb: at every window step, samples branch off one shared trajectory, the trunk.

    The step at which they branch off causes all differences between the `children` of a step.

    Source: TempFlow-GRPO, arXiv:2508.04324, 6 children and an ODE trunk. Common noise is our own.
    """

    splits: Sequence[NonNegativeInt] | None = None
    """Indices of the steps at which samples branch off. Null: every step of the window."""
    children: Children = 6
    """Number of samples that are compared at each of these steps, at least 2."""
    common_noise: bool = False
    """Whether the trunk is stochastic and its branches reuse its later noise. The trunk is then one
    of the children of every step, and values are unbiased for the stochastic policy. False: trunk
    and completions are ODE paths, which measure another policy."""

    @override
    def seed_layout(self, num_samples: int, eta: Float[Tensor, "T"]) -> BranchLayout:
        """Return the children of each step, in the order of the steps.

        The last sample branches off last and holds the states of the trunk.
        """
        splits, trunk = _split_steps(self.splits, eta), num_samples - 1
        branches = self.children - self.common_noise
        expected = branches * len(splits) + self.common_noise
        _require_samples(f"comb with {self.children} children at {splits}", expected, num_samples)
        leaves_at = torch.tensor(splits).repeat_interleave(branches)
        leaves_at = torch.cat([leaves_at, leaves_at[-1:]])[:num_samples, None]
        sample, steps = torch.arange(num_samples)[:, None], torch.arange(len(eta))
        on_trunk = torch.arange(len(eta) + 1) <= leaves_at
        source = torch.where(on_trunk, trunk, sample)
        if not self.common_noise:
            return BranchLayout(torch.where(leaves_at == steps, eta, 0.0), SharedRows(source))
        noise = torch.where(leaves_at == steps, sample, trunk)
        return BranchLayout(eta.expand(num_samples, -1), SharedRows(source, noise))


def arrange_samples(
    branching: Branching, num_samples: int, seeds: int, eta: Float[Tensor, "T"]
) -> BranchLayout:
    """Return the layout of one prompt, with the same arrangement for each initial noise."""
    if num_samples % seeds:
        raise ValueError(
            f"sampling.samples_per_prompt is {num_samples}, "
            f"which seeds_per_prompt {seeds} does not divide"
        )
    one = branching.seed_layout(num_samples // seeds, eta)
    return BranchLayout(one.eta.repeat(seeds, 1), one.rows.repeat(seeds))


def _require_samples(layout: str, expected: int, num_samples: int) -> None:
    if num_samples != expected:
        raise ValueError(
            f"a {layout} has {expected} samples per initial noise, not {num_samples}.\nSet recipe."
            f"sampling.samples_per_prompt to {expected} x recipe.sampling.seeds_per_prompt"
        )


def _split_steps(splits: Sequence[int] | None, eta: Float[Tensor, "T"]) -> list[int]:
    """Return the steps at which states split, in order."""
    window = _stochastic_steps(eta)
    chosen = window if splits is None else sorted(splits)
    outside = sorted(set(chosen) - set(window))
    if outside or not chosen:
        raise ValueError(
            f"branching splits at {outside or chosen}, which the window does not make stochastic: "
            f"it has steps {window}. Change recipe.sampling.branching.splits or sde_window"
        )
    return chosen


def _stochastic_steps(eta: Float[Tensor, "T"]) -> list[int]:
    return eta.nonzero().flatten().tolist()


def _leaves_below(
    num_samples: int, children: int, num_steps: int, splits: Sequence[int]
) -> Int[Tensor, "S"]:
    """Return the number of samples that share each state k."""
    done = [sum(split < k for split in splits) for k in range(num_steps + 1)]
    return num_samples // children ** torch.tensor(done)


def _shared_rows(num_samples: int, below: Int[Tensor, "S"]) -> SharedRows:
    return SharedRows(torch.arange(num_samples)[:, None] // below * below)
