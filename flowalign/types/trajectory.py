"""What the old policy did: trajectories, with those of their states that someone will look at."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowalign.functional.tail import Completion
from flowalign.functional.transition import Kernel

Cond = Mapping[str, Tensor]
"""Text conditioning as a policy understands it. Every tensor has a leading sample axis."""


@dataclass(frozen=True)
class Trajectory:
    """B denoising trajectories that share one schedule, as sampled by the old policy."""

    logp: Float[Tensor, "B T"]
    """log pi_old(x_{k+1} | x_k), averaged over latent elements; 0 on deterministic steps."""
    states: Mapping[int, Float[Tensor, "_ *latent"]]
    """The kept states by index, one row per holder, in the dtype that logp was computed from.
    `state` and `held` read them."""
    sigmas: Float[Tensor, "T+1"]
    eta: Float[Tensor, "B T"]
    """Noise level of each transition. 0 marks an ODE step, which carries no gradient."""
    kernel: Kernel
    """The transition family that drew the states; losses replay this one and no other."""
    cond: Cond
    """One row per prompt; sample b uses row b // group_size."""
    prompts: Sequence[str]
    """One per sample."""
    group_size: int
    origin: Int[Tensor, "B T+1"]
    """Which sample computed state k of sample b. Samples of a tree share states: equal entries are
    one state, and they share every earlier one too."""
    means: Mapping[int, Float[Tensor, "B *latent"]] = field(default_factory=dict)
    """Means of the old transitions by step, where a loss asked for them."""
    finished: Mapping[tuple[int, Completion], Float[Tensor, "n *latent"]] = field(
        default_factory=dict
    )
    """What the ODE makes of state k, one row per holder of it, where credit asks for its value."""

    @property
    def num_steps(self) -> int:
        """T, the number of transitions."""
        return self.logp.shape[1]

    @property
    def device(self) -> torch.device:
        """Where the policy computes; states may be kept elsewhere."""
        return self.logp.device

    def held(self, k: int) -> Float[Tensor, "n *latent"]:
        """State k in float32, one row per holder. ValueError where it was not kept."""
        return self._kept(k).to(self.device).float()

    def state(
        self, k: int, samples: Int[Tensor, "n"] | slice = slice(None)
    ) -> Float[Tensor, "n *latent"]:
        """State k of the given samples in float32. ValueError where it was not kept."""
        kept = self._kept(k)
        rows = self.places(k)[samples]
        return kept[rows.to(kept.device)].to(self.device).float()

    def mean(self, k: int, samples: Int[Tensor, "n"]) -> Float[Tensor, "n *latent"] | None:
        """Mean of transition k of the given samples; None where no loss asked for means."""
        if k not in self.means:
            return None
        return self.means[k][samples.to(self.means[k].device)].to(self.device)

    def holders(self, k: int) -> Int[Tensor, "n"]:
        """The samples that computed a state k: one per distinct state."""
        origin = self.origin[:, k]
        return (origin == torch.arange(len(origin))).nonzero().flatten()

    def places(self, k: int) -> Int[Tensor, "B"]:
        """Where in `holders(k)` each sample finds its state k."""
        return torch.searchsorted(self.holders(k), self.origin[:, k].contiguous())

    @property
    def trained(self) -> Bool[Tensor, "B T"]:
        """Stochastic transitions; one that samples share is True for a single one of them."""
        own = self.origin[:, 1:] == torch.arange(len(self.origin))[:, None]
        return own & (self.eta > 0).cpu()

    def _kept(self, k: int) -> Float[Tensor, "n *latent"]:
        if k not in self.states:
            raise ValueError(
                f"state {k} of a trajectory is asked for, which kept states {sorted(self.states)}: "
                "those of the window, the last,\nand what credit reads of a trajectory of zeros"
            )
        return self.states[k]
