"""Provide the clean latents that rewards score, from rollouts or from photos."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from typing_extensions import override

from flowalign.functional.transition import DDIM, FlowSDE, Kernel
from flowalign.sampling.rollout import sample
from flowalign.sampling.sampling_settings import NoiseLevel, Sampling
from flowalign.types import Policy, Request, SharedRows, Trajectory, encode_requests
from flowalign.utils.ranges import DenoisingSteps, GroupSize, PositiveInt, require_ranges


class Start(ABC):
    """Source of the samples that a gradient path starts from."""

    num_steps: int
    """Number of denoising steps that a gradient path can replay; 0 without a rollout."""
    samples_per_prompt: int
    """Number of samples per prompt."""
    stochastic: ClassVar[bool] = False
    """Whether the steps of rollouts draw noise."""

    def __post_init__(self) -> None:
        """Reject settings outside their ranges."""
        require_ranges(self, "recipe.start")

    def check(self, policy: Policy, requests: Sequence[Request]) -> None:  # noqa: B027
        """Raise ValueError if the requests or the policy are unsuitable."""

    @abstractmethod
    def trajectory(
        self, policy: Policy, requests: Sequence[Request], generators: Sequence[torch.Generator]
    ) -> Trajectory:
        """Return the samples of the requests, with all available states."""


@dataclass(frozen=True, kw_only=True)
class FromRollouts(Start):
    """Deterministic rollouts without gradient, with all states kept."""

    num_steps: DenoisingSteps = 25
    """Number T of denoising steps of a rollout. Default: 25, as in FlowBP and SRPO."""
    samples_per_prompt: GroupSize = 1
    """Number of samples per prompt."""
    micro_batch: PositiveInt = 64
    """Number of samples per network call of the rollout."""

    @override
    def trajectory(
        self, policy: Policy, requests: Sequence[Request], generators: Sequence[torch.Generator]
    ) -> Trajectory:
        return sample(policy, requests, self.sampling, self.steps, generators)

    @property
    def sampling(self) -> Sampling:
        """Return the settings of the sampler."""
        return Sampling(
            num_steps=self.num_steps,
            samples_per_prompt=self.samples_per_prompt,
            micro_batch=self.micro_batch,
        )

    @property
    def steps(self) -> Sequence[int]:
        """Return the steps that draw noise."""
        return ()


@dataclass(frozen=True, kw_only=True)
class FromNoisyRollouts(FromRollouts):
    """Rollouts with noise at every step, for `AdjointMatching`.

    The defaults draw the steps of an SDE without memory: a sample does not depend on its initial
    noise. With less noise, the optimum of adjoint matching is biased.
    """

    stochastic = True
    kernel: Kernel = field(default_factory=DDIM)
    """Transition family. `DDIM` with eta 1 equals `Precise` with eta sqrt(2)."""
    eta: NoiseLevel = 1.0
    """Noise level, whose meaning depends on the kernel."""

    @override
    def check(self, policy: Policy, requests: Sequence[Request]) -> None:
        self.sampling.layout(self.steps)

    @property
    @override
    def sampling(self) -> Sampling:
        return replace(super().sampling, kernel=self.kernel, eta=self.eta)

    @property
    @override
    def steps(self) -> Sequence[int]:
        return range(self.num_steps)


@dataclass(frozen=True, kw_only=True)
class FromPhotos(Start):
    """Encoded photos of the requests, instead of samples.

    `recipe.prompts` must be JSONL with the fields `prompt` and `image`. The gradient path must
    noise the sample itself, as DirectAlign does.

    Source: SRPO, arXiv:2509.06942, which trains on fewer than 1,500 photos instead of rollouts.
    """

    num_steps = 0
    samples_per_prompt: GroupSize = 1
    """Number of copies of each photo, with independent noise."""

    @override
    def check(self, policy: Policy, requests: Sequence[Request]) -> None:
        policy.check_stored_media("recipe.start")
        if policy.input_spec.references[1]:
            raise ValueError(
                f"recipe.start FromPhotos takes the image of a request as its sample, but "
                f"{type(policy).__name__} uses it as a {policy.input_spec.kind}: use "
                "FromRollouts"
            )
        for request in requests:
            if len(request.references) != 1:
                raise ValueError(
                    f"recipe.start FromPhotos needs one image for each prompt; "
                    f"{request.prompt!r} has {len(request.references)}: add it to the rows of "
                    "recipe.prompts, or use FromRollouts"
                )

    @override
    def trajectory(
        self, policy: Policy, requests: Sequence[Request], generators: Sequence[torch.Generator]
    ) -> Trajectory:
        clean = torch.cat([policy.embed(r.references[0].read()[None, :1]) for r in requests])
        clean = clean.float().repeat_interleave(self.samples_per_prompt, 0)
        count, sigmas = len(clean), clean.new_tensor([1.0, 0.0])
        return Trajectory(
            logp=clean.new_zeros(count, 1),
            states={1: clean},
            sigmas=sigmas,
            eta=clean.new_zeros(count, 1),
            kernel=FlowSDE(),
            cond=encode_requests(policy, requests),
            requests=[request for request in requests for _ in range(self.samples_per_prompt)],
            group_size=self.samples_per_prompt,
            rows=SharedRows(torch.arange(count)[:, None].expand(-1, 2).contiguous()),
        )
