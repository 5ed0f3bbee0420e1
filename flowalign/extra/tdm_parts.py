"""Define the settings of few-step distillation, its networks, and its renoised boundaries."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.functional.distribution_matching import levels_above, renoise_boundary
from flowalign.functional.noise_matching import add_noise
from flowalign.functional.transition import per_row
from flowalign.losses.matching.groups import DGPO
from flowalign.rewards.checked import OnFailure as OnFailedReward
from flowalign.sampling.sampling_settings import Sampling
from flowalign.sampling.sde_windows import NoSteps
from flowalign.training.engine import OnFailedCheck
from flowalign.training.learner import Learner, Optimizer
from flowalign.training.reference import EMA, Ramp, TrainedWeights, guide
from flowalign.training.rollouts.advantage_config import AdvantageConfig
from flowalign.training.rollouts.rollout_settings import RolloutSettings
from flowalign.training.rollouts.state_values import CompletionValues
from flowalign.types import Batch, Cond, Trajectory, VelocityField
from flowalign.types.trajectory import take_rows
from flowalign.utils.ranges import (
    DenoisingSteps,
    GuidanceScale,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    require_ranges,
)
from flowalign.utils.seeds import generator


@dataclass(frozen=True, kw_only=True)
class Fake:
    """Settings of the fake score, which learns the distribution of the generator's samples."""

    optimizer: Optimizer = field(
        default_factory=lambda: Optimizer(learning_rate=3e-4, betas=(0.0, 0.999))
    )
    """AdamW of the fake score."""
    updates: PositiveInt = 5
    """Number of fake score updates per generator update. TDM: 5, TDM-R1: 1."""
    largest_snr: PositiveFloat = 5.0
    """Upper bound of the weight ((1 - t) / t)^2 of the prediction error."""
    largest_importance: PositiveFloat = 20.0
    """Upper bound of the importance weight, which corrects for noise that is not fresh."""


@dataclass(frozen=True, kw_only=True)
class RewardSurrogate:
    """Settings of the surrogate reward, which learns to prefer the better samples of a group.

    The reward of a finished sample applies to all boundaries of its trajectory.
    """

    loss: DGPO = field(default_factory=lambda: DGPO(beta=10.0, clip=1e-3, drift=1e-3, runaway=0.05))
    """Loss at a boundary. Its beta is multiplied by (k + 1) / K at boundary k of K. Its reference
    is the initial model, and its old policy is the surrogate's slow copy."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    """AdamW of the surrogate."""
    slow: Ramp = field(default_factory=lambda: Ramp(slope=0.001, highest=0.3))
    """Decay of the surrogate's slow copy, averaged after each update. Default: min(0.3, 0.001
    n)."""
    weight: PositiveFloat = 0.7
    """Weight of the surrogate in the generator's loss."""
    advantages: AdvantageConfig = field(default_factory=AdvantageConfig)
    """Comparison of the samples of a prompt."""
    on_failed_reward: OnFailedReward = "raise"
    """Action after a failed reward. raise: the run ends. drop_sample: the surrogate is not trained
    on samples without a reward. drop_group: nor on the other samples of the prompt."""


@dataclass(frozen=True, kw_only=True)
class TDMSettings:
    """Settings of the generator, the fake score and the surrogate."""

    prompts_per_step: PositiveInt = 16
    """Number of prompts per step, over all processes."""
    samples_per_prompt: PositiveInt = 1
    """Number of samples per prompt; at least 2 with a surrogate, which compares them."""
    num_steps: DenoisingSteps = 4
    """Number K of denoising steps of the generator, and of boundaries per trajectory."""
    real_guidance: GuidanceScale = 4.5
    """Classifier-free guidance scale of the real score, the initial model. 1: none. model: the
    scale of the policy's run file."""
    guidance_weight: NonNegativeFloat = 0.0
    """Weight of an additional loss term along the guidance of the real score. TDM-R1: 0.3; TDM:
    0."""
    guidance_scale: PositiveFloat = 3.5
    """Length of the additional guidance step, in units of the conditional minus the unconditional
    prediction."""
    huber: PositiveFloat | None = 1e-3
    """Constant c of the loss sqrt(d^2 + c^2) - c. Null: d^2 / 2, as in TDM-R1."""
    query: Literal["interval", "above"] = "interval"
    """Range of the uniform noise levels for renoising a boundary. interval: up to the level at
    which its step started. above: up to the highest level of the schedule."""
    fake: Fake = field(default_factory=Fake)
    """Settings of the fake score."""
    surrogate: RewardSurrogate | None = None
    """Settings of the surrogate reward (TDM-R1). Null: distillation without reward (TDM)."""
    micro_batch: PositiveInt = 32
    """Number of samples at one boundary per forward and backward pass; with a surrogate, whole
    groups. It changes memory, not the update."""
    on_failed_check: OnFailedCheck = "raise"
    """Action after a failed check of the first updates. raise: the run ends. warn: a message is
    logged."""

    def __post_init__(self) -> None:
        """Reject invalid settings before any model is loaded."""
        require_ranges(self, "recipe")
        if self.real_guidance != "model":
            self.check_guidance(self.real_guidance)
        if self.surrogate:
            self.surrogate.advantages.check_groups("recipe.surrogate", self.samples_per_prompt)
            self._check_surrogate(self.surrogate)

    def check_guidance(self, scale: float) -> None:
        """Raise ValueError if a step along guidance of the scale has no direction."""
        if self.guidance_weight and scale <= 1:
            raise ValueError(
                f"recipe.guidance_weight is {self.guidance_weight}, but recipe.real_guidance is "
                f"{scale}, which has no direction: set it above 1, or the weight to 0"
            )

    def _check_surrogate(self, surrogate: RewardSurrogate) -> None:
        """Raise ValueError for a micro-batch below the group size, and unsuitable advantages."""
        if self.micro_batch < self.samples_per_prompt:
            raise ValueError(
                f"recipe.micro_batch is {self.micro_batch}, but the surrogate compares all of the "
                f"{self.samples_per_prompt} samples of a prompt: make it at least as large"
            )
        surrogate.advantages.refuse_extremes("recipe.surrogate", "all samples of a group count")
        self.rollouts.requirements(())

    @property
    def rollouts(self) -> RolloutSettings:
        """Return the settings of the generator's deterministic trajectories."""
        return RolloutSettings(
            prompts_per_step=self.prompts_per_step,
            sampling=Sampling(
                num_steps=self.num_steps,
                samples_per_prompt=self.samples_per_prompt,
                sde_window=NoSteps(),
                micro_batch=self.micro_batch,
            ),
            advantages=self.surrogate.advantages if self.surrogate else AdvantageConfig(),
            key="recipe.surrogate",
            keeps="all",
        )

    @property
    def examples_per_step(self) -> int:
        """Return the number of samples per step, over all processes."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def rows(self) -> int:
        """Return the number of boundaries per step, over all processes."""
        return self.examples_per_step * self.num_steps

    @property
    def samples_together(self) -> int:
        """Return the number of samples per micro-batch, rounded down to whole groups."""
        size = self.samples_per_prompt
        return max(self.micro_batch // size, 1) * size if self.surrogate else self.micro_batch


SLOW = "slow"


@dataclass(frozen=True)
class Roles:
    """Learners that share one network, with all velocity fields."""

    generator: Learner
    """Learner of the policy, which is the few-step generator."""
    fake: Learner
    """Learner of the fake score."""
    surrogate: Learner | None
    """Learner of the surrogate reward, or None."""
    fields: dict[str, VelocityField]
    """Velocity fields by name: reference (without trained weights), real (the guided reference),
    fake, surrogate, guided_surrogate and slow (the slow copy of the surrogate)."""

    @property
    def trained(self) -> dict[str, Learner]:
        """Return the learners by role."""
        trained = {"generator": self.generator, "fake": self.fake}
        return trained | ({"surrogate": self.surrogate} if self.surrogate else {})


def open_roles(cfg: TDMSettings, learner: Learner, num_steps: int) -> Roles:
    """Add the learners of the fake score and the surrogate, which start as the initial model.

    Raises:
        ValueError: The reference needs guidance but the policy has none.
    """
    fake = learner.add_companion("fake", cfg.fake.optimizer, num_steps * cfg.fake.updates)
    fields = {
        "reference": learner.reference,
        "real": guide(learner.reference, learner.policy, cfg.real_guidance),
        "fake": fake.field,
    }
    if cfg.surrogate is None:
        return Roles(learner, fake, None, fields)
    surrogate = learner.add_companion("surrogate", cfg.surrogate.optimizer, num_steps)
    slow = EMA(surrogate.parameters, cfg.surrogate.slow.at)
    surrogate.averages[SLOW] = slow
    fields |= {
        "surrogate": surrogate.field,
        "guided_surrogate": guide(surrogate.field, learner.policy, cfg.real_guidance),
        "slow": TrainedWeights(
            learner.policy, dict(zip(surrogate.named, slow.average, strict=True))
        ),
    }
    return Roles(learner, fake, surrogate, fields)


@dataclass(frozen=True)
class RenoisedBoundaries:
    """Boundaries after renoising, without gradient."""

    x0_hat: Float[Tensor, "n *latent"]
    """Predicted clean latents of each boundary."""
    noise: Float[Tensor, "n *latent"]
    """Total noise of each boundary after renoising, with unit variance."""
    fresh: Float[Tensor, "n *latent"]
    """Freshly drawn part of the noise."""
    t: Float[Tensor, "n"]
    """Noise level of each renoised boundary."""
    cond: Cond
    """Conditioning of each boundary."""

    @property
    def x(self) -> Float[Tensor, "n *latent"]:
        """Return the renoised states."""
        return add_noise(self.x0_hat, self.noise, self.t)

    def predicted(self, field: VelocityField) -> Float[Tensor, "n *latent"]:
        """Return the clean latents that a velocity field predicts."""
        x = self.x
        return x - per_row(self.t, x) * field.velocity(x, self.t, self.cond)


@dataclass(frozen=True)
class Boundaries:
    """Trajectories of one step on this process, with their boundaries."""

    values: CompletionValues
    """Deterministic trajectories with all their states, and the rewards of their samples."""
    first: int
    """Global position of this process's first sample."""
    above: bool
    """Whether boundaries are renoised up to the highest level instead of the start of their
    step."""

    @property
    def trajectory(self) -> Trajectory:
        """Return the trajectories."""
        return self.values.trajectory

    @property
    def num_steps(self) -> int:
        """Return K, the number of boundaries of a trajectory."""
        return self.trajectory.num_steps

    def rows(self, samples: Int[Tensor, "m"]) -> Batch:
        """Return one row for each boundary of some samples, ordered by step."""
        k = torch.arange(self.num_steps).repeat_interleave(len(samples))
        return Batch({"k": k, "row": samples.repeat(self.num_steps)})

    def start(
        self, k: int, samples: Int[Tensor, "n"]
    ) -> tuple[Float[Tensor, "n *latent"], Float[Tensor, ""], Cond]:
        """Return the states before step k, their noise level and their conditioning."""
        trajectory = self.trajectory
        rows = trajectory.prompt[samples].to(trajectory.device)
        return trajectory.state(k, samples), trajectory.sigmas[k], take_rows(trajectory.cond, rows)

    def velocity(self, k: int, samples: Int[Tensor, "n"]) -> Float[Tensor, "n *latent"]:
        """Return the velocity of step k."""
        trajectory = self.trajectory
        change = trajectory.state(k + 1, samples) - trajectory.state(k, samples)
        return change / (trajectory.sigmas[k + 1] - trajectory.sigmas[k])

    def renoised(
        self,
        k: int,
        samples: Int[Tensor, "n"],
        x0_hat: Float[Tensor, "n *latent"],
        noise: Float[Tensor, "n *latent"],
        key: tuple[int, str, int, int],
        shared: bool = False,
    ) -> RenoisedBoundaries:
        """Return boundary k of some samples after renoising.

        Draws depend on `key` and on the global position of the sample. If `shared` is set, they
        depend on the group instead of the sample.
        """
        trajectory = self.trajectory
        place = self.first + samples
        place = place // trajectory.group_size if shared else place
        seed, purpose, *index = key
        draws = [generator(seed, purpose, *index, k, int(i)) for i in place]
        uniform = torch.cat([torch.rand(1, generator=draw) for draw in draws])
        fresh = torch.stack([torch.randn(x0_hat.shape[1:], generator=draw) for draw in draws])
        m, sigmas = trajectory.sigmas[k + 1], trajectory.sigmas
        t = levels_above(uniform.to(x0_hat), m, sigmas[0] if self.above else sigmas[k])
        cond = take_rows(trajectory.cond, trajectory.prompt[samples].to(trajectory.device))
        fresh, data = fresh.to(x0_hat), x0_hat.detach()
        return RenoisedBoundaries(
            data, renoise_boundary(noise.detach(), fresh, m, t), fresh, t, cond
        )
