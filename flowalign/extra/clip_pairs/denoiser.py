"""Noise, denoise and score videos with a loaded policy, for the pair generators."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.extra.clip_pairs.corruption import restore_unmasked
from flowalign.functional.noise_matching import add_noise
from flowalign.rewards.composite import Rewards
from flowalign.sampling.complete_states import evaluate_velocity
from flowalign.sampling.inference import encode_once
from flowalign.types import Policy, Request
from flowalign.utils.seeds import generator


@dataclass(frozen=True)
class Clips:
    """Real videos in the policy's latent space."""

    latents: Float[Tensor, "n C F H W"]
    requests: Sequence[Request]
    numbers: Sequence[int]
    """Indices in the dataset. Together with the seed, they determine the random draws of each
    video."""


@dataclass(frozen=True)
class ClipScores:
    """Rewards of a batch of videos."""

    total: Float[Tensor, "n"]
    """Weighted sum of the dimensions; NaN if a weighted dimension could not be scored."""
    by_dimension: Mapping[str, Float[Tensor, "n"]]
    """Scores of each dimension with a weight."""
    reasons: Mapping[int, str]
    """Reason for each video without a total, by index."""


@dataclass(frozen=True)
class ClipRegenerator:
    """Denoiser and scorer of videos, with a loaded policy and loaded rewards."""

    policy: Policy
    rewards: Rewards
    num_steps: int
    """Steps of the sampler from pure noise."""
    seed: int
    micro_batch: int
    """Number of videos per network call and decode."""

    @cached_property
    def encoder(self) -> str:
        """Identifier of the policy's VAE; the first access reads weights."""
        return self.policy.encoders()[0]

    def make_generators(self, purpose: str, clips: Clips) -> list[torch.Generator]:
        """Return a random generator for each video, a function of seed, purpose and index."""
        return [generator(self.seed, f"clip {purpose}", number) for number in clips.numbers]

    def draw_noise(self, purpose: str, clips: Clips) -> Float[Tensor, "n C F H W"]:
        """Return standard normal noise for each video, independent of the policy's first sigma."""
        shape = clips.latents.shape[1:]
        drawn = [torch.randn(shape, generator=g) for g in self.make_generators(purpose, clips)]
        return torch.stack(drawn).to(clips.latents)

    @torch.no_grad()
    def regenerate(
        self,
        clips: Clips,
        noise: Float[Tensor, "n C F H W"],
        starts: Int[Tensor, "n"],
        mask: Float[Tensor, "n 1 F H W"] | None = None,
    ) -> Float[Tensor, "n C F H W"]:
        """Noise videos to the level of step `starts`, and denoise them from there with the ODE.

        With a mask, only positions inside it change, see `restore_unmasked`. A video joins the loop
        at its own start, so videos with different noise levels share network calls.
        """
        policy, clean = self.policy, clips.latents
        sigmas = policy.schedule(self.num_steps)
        cond, row = encode_once(policy, clips.requests)
        row, starts = row.to(clean.device), starts.to(clean.device)
        x = add_noise(clean, noise, sigmas[starts])
        for k in range(int(starts.min()), self.num_steps):
            here = starts <= k
            v = evaluate_velocity(policy, x[here], sigmas[k], cond, row[here], self.micro_batch)
            x[here] = x[here] + (sigmas[k + 1] - sigmas[k]) * v
            if mask is not None:
                kept = restore_unmasked(x, clean, noise, sigmas[k + 1], mask)
                x = torch.where(here.view(-1, 1, 1, 1, 1), kept, x)
        return x

    def decode(self, latents: Float[Tensor, "n C F H W"]) -> Float[Tensor, "n T 3 h w"]:
        """Decode latents to frames in [0, 1], on the CPU."""
        self.rewards.costs.decodes += len(latents)
        return torch.cat([self.policy.decode(x).cpu() for x in latents.split(self.micro_batch)])

    def score(self, media: Float[Tensor, "n T 3 h w"], requests: Sequence[Request]) -> ClipScores:
        """Score videos of equal length with the rewards and their weights."""
        output = self.rewards.score(self.rewards.batch(media, requests, fps=self.policy.fps))
        weights, unknown = self.rewards.weights, ~self.rewards.usable(output.valid)
        weighted = weights != 0
        total = (output.values[:, weighted] * weights[weighted]).sum(1)
        dims = zip(self.rewards.dims, output.values.unbind(1), weighted.tolist(), strict=True)
        return ClipScores(
            total.masked_fill(unknown, torch.nan),
            {dim: values for dim, values, counts in dims if counts},
            {i: output.reasons.get(i, "no reason given") for i in unknown.nonzero()[:, 0].tolist()},
        )
