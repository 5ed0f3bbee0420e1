"""Compare a server's samples with those of the training process, from equal initial noise."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.rewards.composite import Rewards
from flowalign.sampling.complete_states import evaluate_velocity
from flowalign.sampling.sampling_settings import Sampling
from flowalign.training.sglang.messages import as_media, relative_distance, rollout_request
from flowalign.types import Policy, Request, encode_requests

REWARD_PROMPTS, REWARD_SAMPLES = 4, 4


class BackendComparison:
    """Comparison of deterministic samples of the server and of the training process."""

    def __init__(self, policy: Policy, rewards: Rewards, sampling: Sampling, seed: int):
        self.policy, self.rewards, self.sampling, self.seed = policy, rewards, sampling, seed

    def request(self, request: Request, samples: int, guidance: float) -> dict[str, Any]:
        """Return the request for deterministic samples of a prompt with the fixed seed."""
        sampling = replace(self.sampling, samples_per_prompt=samples, untrained_steps="ode")
        return rollout_request(sampling, (), request, self.seed, guidance)

    def seed_gap(self, request: Request, sample: Mapping[str, Tensor]) -> float:
        """Return the relative distance between both samples of the fixed seed."""
        own = self._continue([request], [sample])
        return relative_distance(sample["latents"][-1], own[0].cpu())

    def reward_gap(
        self, requests: Sequence[Request], samples: Sequence[Sequence[Mapping[str, Tensor]]]
    ) -> dict[str, float]:
        """Return, by reward, the difference of the mean rewards in standard deviations.

        `samples` has the server's samples of each request. The server's media are scored as well
        as those that the training process samples and decodes.
        """
        flat = [sample for part in samples for sample in part]
        repeated = [r for r, part in zip(requests, samples, strict=True) for _ in part]
        own = self._continue(repeated, flat)
        with torch.no_grad():
            here = self.policy.decode(own).cpu()
        groups = [i for i, part in enumerate(samples) for _ in part]
        there, ours = (self._score(media, repeated, groups) for media in (as_media(flat), here))
        both = (there.isfinite() & ours.isfinite()).all(1)
        there, ours = there[both], ours[both]
        if not len(ours):
            return {}
        difference, spread = (there.mean(0) - ours.mean(0)).abs(), ours.std(0, correction=0)
        gap = torch.where(difference > 0, difference / spread, 0.0)
        return dict(zip(self.rewards.dims, gap.tolist(), strict=True))

    @torch.no_grad()
    def _continue(
        self, requests: Sequence[Request], samples: Sequence[Mapping[str, Tensor]]
    ) -> Float[Tensor, "n *latent"]:
        """Return the clean latents of the training process from the server's initial noise."""
        cond = encode_requests(self.policy, requests)
        device = next(iter(cond.values())).device
        x = torch.stack([sample["latents"][0] for sample in samples]).to(device)
        sigmas, row = samples[0]["sigmas"].to(device), torch.arange(len(x), device=device)
        for k in range(len(sigmas) - 1):
            v = evaluate_velocity(self.policy, x, sigmas[k], cond, row, self.sampling.micro_batch)
            x = x + (sigmas[k + 1] - sigmas[k]) * v
        return x

    def _score(
        self, media: Tensor, requests: Sequence[Request], groups: Sequence[int]
    ) -> Float[Tensor, "n R"]:
        scoring = self.rewards.scoring()
        scoring.add(self.rewards.batch(media, requests, groups, self.policy.fps))
        return scoring.result().values.float()
