"""Configure the sampling of trajectories: noise, window, branching and storage."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.functional.transition import FlowSDE, Kernel
from flowalign.sampling.branching import Branching, BranchLayout, Chain, Comb, arrange_samples
from flowalign.sampling.reward_guidance import RewardGuidance
from flowalign.sampling.sde_windows import AllButLast, FrameWindow, SDEWindow
from flowalign.types import Policy, Reduced
from flowalign.types.trajectory import Completion
from flowalign.utils.errors import refuse_conflicts, require_default
from flowalign.utils.ranges import (
    DenoisingSteps,
    GroupSize,
    PositiveFloat,
    PositiveInt,
    Range,
    require_ranges,
)

NoiseLevel: TypeAlias = Annotated[float, Range(above=0, most=10)]
StepNoiseLevel: TypeAlias = Annotated[float, Range(above=0, most=1000)]
"""Noise level of one step; calibrated levels of `DanceSDE` exceed 10 next to pure noise."""


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Device and precision of the rollout states that are kept for training."""

    device: Literal["same", "cpu"] = "same"
    """Device of the kept states. same: the policy's device. cpu: main memory, which needs a copy of
    each kept state and of each minibatch."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the kept states. The rollout continues from the rounded states, so training
    evaluates the policy at the same inputs."""

    def round(self, x: Float[Tensor, "n *latent"]) -> Float[Tensor, "n *latent"]:
        """Return a state in float32 after rounding to the stored precision."""
        return x.to(DTYPES[self.dtype]).float()

    def store(self, x: Float[Tensor, "n *latent"]) -> Float[Tensor, "n *latent"]:
        """Return a rounded state in the precision and on the device of kept states."""
        return self.place(x.to(DTYPES[self.dtype]))

    def place(self, x: Float[Tensor, "n *latent"]) -> Float[Tensor, "n *latent"]:
        """Return a tensor on the device of kept states."""
        return x.cpu() if self.device == "cpu" else x


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings of the trajectories of a prompt."""

    num_steps: DenoisingSteps = 10
    """Number T of denoising steps of a trajectory. Default: 10, as in Flow-GRPO's SD3.5 runs."""
    samples_per_prompt: GroupSize = 24
    """Group size G, the number of samples per prompt that are compared. Default: 24, as in
    Flow-GRPO's SD3.5 runs."""
    eta: NoiseLevel | list[StepNoiseLevel] = 0.7
    """Noise level inside the window, or a list with one level per step. The kernel defines its
    meaning. Default: 0.7, as in Flow-GRPO."""
    kernel: Kernel = field(default_factory=FlowSDE)
    """Transition family, which defines the noise of a step."""
    sde_window: SDEWindow = field(default_factory=AllButLast)
    """Stochastic, trained steps."""
    untrained_steps: Literal["ode", "sde", "shared_sde"] = "ode"
    """Noise of the steps outside the window, except the last step, which is always an ODE step.
    ode: none. sde: as in the window (DanceGRPO). shared_sde: as in the window, but samples with the
    same initial noise share the steps before the window (B2-DiffuRL)."""
    tail_ratio: Annotated[float, Range(above=0, most=1)] | None = None
    """Share of the steps after the window that remain. The remaining steps are longer and of second
    order. MixGRPO-Flash: 0.4. Null: all steps, by Euler's method."""
    seeds_per_prompt: PositiveInt | None = None
    """Number of different initial noises among the samples of a prompt. 1: all samples share it
    (DanceGRPO, MixGRPO). TempFlow-GRPO: 4. Null: one per sample for chains, 1 for trees and
    combs."""
    branching: Branching = field(default_factory=Chain)
    """Arrangement of the samples of one initial noise: chain, tree or comb."""
    merge: PositiveFloat | None = None
    """Target of exp(entropy per element) of the single SDE step, which is made longer to reach it.
    E-GRPO: 2.2. Null: no step is merged."""
    frame_window: FrameWindow | None = None
    """Latent frames of a video in which the samples of a prompt differ. Null: all frames."""
    reward_guidance: RewardGuidance | None = None
    """Guidance of the states by the gradient of a latent reward, such as `Euphonium`.
    Log-probabilities are those of the policy without guidance. Null: none."""
    states: Storage = field(default_factory=Storage)
    """Device and precision of the states that are kept for training."""
    precision: Reduced | None = None
    """Precision of the network in rollouts if it is lower than `policy.precision`, such as bf16
    with fp32. It is for losses that need no log-probabilities of rollouts. Null: the policy's
    precision."""
    micro_batch: PositiveInt = 64
    """Number of samples per network call, decode and reward call. Rollout memory grows with it."""

    def __post_init__(self) -> None:
        """Reject invalid settings before any model is loaded."""
        require_ranges(self, "sampling")
        if isinstance(self.eta, list) and len(self.eta) != self.num_steps:
            raise ValueError(
                f"sampling.eta has {len(self.eta)} levels for {self.num_steps} steps; "
                "give one number, or one for each step"
            )
        refuse_conflicts(self, "sampling", _CONFLICTS)

    def check_precision(self, key: str, policy: Policy) -> None:
        """Raise ValueError if `precision` is set but not lower than the policy's precision."""
        if policy.precision != "fp32" or policy.network is None:
            reason = (
                f"policy.precision is {policy.precision}"
                if policy.precision != "fp32"
                else f"{type(policy).__name__} has one precision"
            )
            require_default(self, f"{key}.sampling", reason, "precision")

    def _levels_at(self, steps: Sequence[int]) -> Float[Tensor, "T"]:
        eta, chosen = torch.zeros(self.num_steps, dtype=torch.float32), list(steps)
        eta[chosen] = torch.tensor(self.eta, dtype=torch.float32).expand(self.num_steps)[chosen]
        return eta

    def stochastic(self, steps: Sequence[int]) -> tuple[int, ...]:
        """Return the stochastic steps if `steps` are the trained steps."""
        untrained = range(self.num_steps - 1) if self.untrained_steps != "ode" else ()
        return tuple(sorted({*steps, *untrained}))

    def tail(self, steps: Sequence[int]) -> list[int]:
        """Return the indices of the states on the ODE path after the last of `steps`."""
        start = max(steps, default=-1) + 1
        if self.tail_ratio is None:
            return list(range(start, self.num_steps + 1))
        count = max(int((self.num_steps - start) * self.tail_ratio), 1)
        return Completion(max_steps=count).path(start, self.num_steps)

    def skipped(self, steps: Sequence[int]) -> frozenset[int]:
        """Return the steps of length 0 in a shorter tail, which need no evaluation."""
        # The long step to state k has index k - 1. The steps before it have length 0.
        made = {k - 1 for k in self.tail(steps)}
        return frozenset(range(max(steps, default=-1) + 1, self.num_steps)) - made

    def layout(self, steps: Sequence[int]) -> BranchLayout:
        """Return the layout of one prompt's samples, with `steps` as the trained steps.

        Raises:
            ValueError: The branching does not fit the number of samples or the steps.
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
                f"sampling.eta is {self.eta}, up to {loudest:g} in branches; "
                f"{type(self.kernel).__name__} takes at most {self.kernel.largest_eta:g}: lower it"
            )
        return arranged

    def as_combs(self, combs: int, children: int, window: int) -> "Sampling":
        """Return the settings with `combs` stochastic combs per prompt.

        `window` is the number of trained steps; the other steps have no noise.
        """
        return replace(
            self,
            branching=Comb(children=children, common_noise=True),
            samples_per_prompt=combs * ((children - 1) * window + 1),
            seeds_per_prompt=combs,
            untrained_steps="ode",
        )

    def num_starts(self, steps: Sequence[int]) -> int:
        """Return the number of different initial noises per prompt."""
        return len(self.layout(steps).rows.source_row[:, 0].unique())


_CONFLICTS = {
    "reward_guidance": (
        "pushes all frames, and single steps of first order",
        ("frame_window", "tail_ratio"),
    ),
    "merge": ("moves points of the schedule", ("tail_ratio",)),
    "untrained_steps": ("adds noise outside the window", ("branching", "merge", "tail_ratio")),
}
"""Settings that others exclude, by the other, with what that does."""


@dataclass(frozen=True, kw_only=True)
class StochasticSampling(Sampling):
    """Noise and branches of the trajectories of a data source that has its own counts."""

    num_steps: DenoisingSteps = field(default=10, init=False)
    """Fixed: `num_steps` of the data source."""
    samples_per_prompt: GroupSize = field(default=24, init=False)
    """Fixed: `samples_per_prompt` of the data source."""
    micro_batch: PositiveInt = field(default=64, init=False)
    """Fixed: `micro_batch` of the data source."""

    def __post_init__(self) -> None:
        """Leave the checks to `with_counts`, because they depend on the counts."""

    def with_counts(self, num_steps: int, samples_per_prompt: int, micro_batch: int) -> Sampling:
        """Return the complete settings; raise ValueError if they do not fit."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        return Sampling(
            num_steps=num_steps,
            samples_per_prompt=samples_per_prompt,
            micro_batch=micro_batch,
            **own,
        )
