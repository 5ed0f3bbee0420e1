"""Configure how trajectories are drawn: their noise and window, and how states are kept."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.functional.transition import FlowSDE, Kernel
from flowalign.sampling.branching import Branching, BranchLayout, Chain, arrange_samples
from flowalign.sampling.frame_windows import FrameWindow
from flowalign.sampling.guidance import RewardGuidance
from flowalign.sampling.recording import Storage
from flowalign.sampling.sde_windows import AllButLast, SDEWindow
from flowalign.types import Policy, Reduced
from flowalign.types.completion import Completion
from flowalign.types.ranges import (
    DenoisingSteps,
    GroupSize,
    PositiveFloat,
    PositiveInt,
    Range,
    require_ranges,
)

NoiseLevel: TypeAlias = Annotated[float, Range(above=0, most=10)]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Configures how the trajectories of a prompt are drawn."""

    num_steps: DenoisingSteps = 10
    """T, denoising steps of a trajectory. Default: 10, as in Flow-GRPO's SD3.5 runs."""
    samples_per_prompt: GroupSize = 24
    """G, the size of the group whose members are compared. Default: 24, as in Flow-GRPO's SD3.5
    runs."""
    eta: NoiseLevel | list[NoiseLevel] = 0.7
    """Noise level inside the window, or one for each step; its meaning is the kernel's. Default:
    0.7, as in Flow-GRPO."""
    kernel: Kernel = field(default_factory=FlowSDE)
    """Transition family: how a step adds noise."""
    sde_window: SDEWindow = field(default_factory=AllButLast)
    """Steps that are stochastic and trained."""
    untrained_steps: Literal["ode", "sde", "shared_sde"] = "ode"
    """What the steps outside the window do, but for the last, which is an ODE step. ode: no noise.
    sde: noise as in the window (DanceGRPO). shared_sde: the same, but samples of one initial noise
    have the steps before the window in common (B2-DiffuRL)."""
    tail_ratio: Annotated[float, Range(above=0, most=1)] | None = None
    """Share of the steps after the window that are made, longer and of second order
    (MixGRPO-Flash: 0.4). Null: all of them, by Euler steps."""
    seeds_per_prompt: PositiveInt | None = None
    """Number of different initial noises among the samples of a prompt. Null: one per sample for
    chains, 1 for trees and combs. 1: all samples share it (DanceGRPO, MixGRPO). TempFlow-GRPO:
    4."""
    branching: Branching = field(default_factory=Chain)
    """Arrangement of the samples of one initial noise: chain, tree or comb."""
    merge: PositiveFloat | None = None
    """Entropy to reach: makes the one SDE step so long that exp(entropy per element) is this.
    E-GRPO: 2.2. Null: no step is merged."""
    frame_window: FrameWindow | None = None
    """Latent frames of a video in which the samples of a prompt differ. Null: all of them."""
    reward_guidance: RewardGuidance | None = None
    """Push of the states up the gradient of a reward of noisy latents, such as `Euphonium`.
    Log-probabilities stay those of the policy without it. Null: none."""
    states: Storage = field(default_factory=Storage)
    """Device and precision of the states that are kept for training."""
    precision: Reduced | None = None
    """Precision of the network in rollouts, where it is lower than `policy.precision`: bf16 beside
    fp32. For losses that need no log-probabilities of rollouts. Null: that of the policy."""
    micro_batch: PositiveInt = 64
    """Samples per network call, decode and reward call; the memory of a rollout grows with it."""

    def __post_init__(self) -> None:
        """Reject settings that no run can use, before anything heavy is loaded."""
        require_ranges(self, "sampling")
        if isinstance(self.eta, list) and len(self.eta) != self.num_steps:
            raise ValueError(
                f"sampling.eta has {len(self.eta)} levels for {self.num_steps} steps; "
                "give one number, or one for each step"
            )
        if self.frame_window is not None and self.reward_guidance is not None:
            raise ValueError(
                "sampling.reward_guidance pushes all frames, but frame_window "
                f"{type(self.frame_window).__name__} shares some: set one of them to null"
            )
        if self.tail_ratio is not None and self.reward_guidance is not None:
            raise ValueError(
                f"sampling.reward_guidance pushes single steps, but tail_ratio {self.tail_ratio} "
                "makes steps of second order: set one of them to null"
            )
        self._check_untrained_steps()

    def refuse_precision(self, key: str, reason: str) -> None:
        """Raise ValueError if rollouts would have a precision of their own."""
        if self.precision is not None:
            raise ValueError(f"{key}.sampling.precision is {self.precision}, but {reason}")

    def check_precision(self, key: str, policy: Policy) -> None:
        """Raise ValueError if rollouts would not have a lower precision than the policy."""
        if self.precision is not None and policy.precision != "fp32":
            self.refuse_precision(key, f"policy.precision is {policy.precision}: set it to null")
        if self.precision is not None and policy.network is None:
            name = type(policy).__name__
            self.refuse_precision(key, f"{name} has one precision: set it to null")

    def _check_untrained_steps(self) -> None:
        if self.merge is not None and self.tail_ratio is not None:
            raise ValueError(
                f"sampling.merge {self.merge} and tail_ratio {self.tail_ratio} both move points of "
                "the schedule: set one of them to null"
            )
        if self.untrained_steps == "ode":
            return
        if not isinstance(self.branching, Chain):
            raise ValueError(
                f"sampling.untrained_steps is {self.untrained_steps}, which needs branching Chain; "
                f"it is {type(self.branching).__name__}"
            )
        for name, value in {"merge": self.merge, "tail_ratio": self.tail_ratio}.items():
            if value is not None:
                raise ValueError(
                    f"sampling.untrained_steps is {self.untrained_steps}, but {name} {value} needs "
                    "steps without noise: set one of them to its default"
                )

    @property
    def _levels(self) -> list[float]:
        return self.eta if isinstance(self.eta, list) else [self.eta]

    def _levels_at(self, steps: Sequence[int]) -> Float[Tensor, "T"]:
        eta, chosen = torch.zeros(self.num_steps), list(steps)
        eta[chosen] = torch.tensor(self.eta).expand(self.num_steps)[chosen]
        return eta

    def stochastic(self, steps: Sequence[int]) -> tuple[int, ...]:
        """Return the steps that draw noise, if those in `steps` are trained."""
        untrained = range(self.num_steps - 1) if self.untrained_steps != "ode" else ()
        return tuple(sorted({*steps, *untrained}))

    def tail(self, steps: Sequence[int]) -> list[int]:
        """Return the states that the ODE visits after the last of `steps`, from its start on."""
        start = max(steps, default=-1) + 1
        if self.tail_ratio is None:
            return list(range(start, self.num_steps + 1))
        count = max(int((self.num_steps - start) * self.tail_ratio), 1)
        return Completion(max_steps=count).path(start, self.num_steps)

    def skipped(self, steps: Sequence[int]) -> frozenset[int]:
        """Return the steps of length 0 that a shorter tail leaves, which cost nothing."""
        # The long step to state k is step k - 1; those before it have length 0.
        made = {k - 1 for k in self.tail(steps)}
        return frozenset(range(max(steps, default=-1) + 1, self.num_steps)) - made

    def layout(self, steps: Sequence[int]) -> BranchLayout:
        """Return the samples of one prompt, stochastic in `steps`.

        Raises:
            ValueError: The samples cannot be arranged in this way.
        """
        if self.merge is not None and len(steps) != 1:
            raise ValueError(
                f"sampling.merge makes one stochastic step longer; the window has {len(steps)}: "
                "set it to null, or recipe.sampling.sde_window to one of size 1"
            )
        seeds, shared = self.seeds_per_prompt, self.untrained_steps == "shared_sde"
        eta = self._levels_at(self.stochastic(steps))
        if seeds is None:
            seeds = self.samples_per_prompt if isinstance(self.branching, Chain) else 1
        apart = self._levels_at(steps) if shared else eta
        arranged = arrange_samples(self.branching, self.samples_per_prompt, seeds, apart)
        if shared:
            arranged = replace(arranged, eta=eta.expand(self.samples_per_prompt, -1))
        if (loudest := float(arranged.eta.max())) > self.kernel.largest_eta:
            raise ValueError(
                f"sampling.eta is {self.eta}, up to {loudest:g} where it branches; "
                f"{type(self.kernel).__name__} takes at most {self.kernel.largest_eta:g}"
                if loudest > max(self._levels)
                else f"sampling.eta is {self.eta}; {type(self.kernel).__name__} takes at most "
                f"{self.kernel.largest_eta:g}: there all of the next state's noise is fresh"
            )
        return arranged

    def num_starts(self, steps: Sequence[int]) -> int:
        """Return the number of different initial noises per prompt."""
        return len(self.layout(steps).rows.source_row[:, 0].unique())
