"""Corrupt, noise, denoise and score videos with a loaded policy, for the pair generators.

Axes: m pairs, C segments of a clip.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.functional.noise_matching import add_noise
from flowalign.rewards.composite import Rewards
from flowalign.sampling.inference import encode_once
from flowalign.sampling.stepping import evaluate_velocity
from flowalign.types import Policy, Request
from flowalign.utils.seeds import generator


def step_at_level(sigmas: Float[Tensor, "S"], level: float) -> int:
    """Return the sampler step with the noise level nearest to `level`.

    The end and pure noise, which would erase the clip, are excluded, so a schedule needs at least
    two steps.
    """
    distance = (sigmas[:-1] - level).abs()
    return int(torch.where(sigmas[:-1] < 1, distance, torch.inf).argmin())


def step_at_share(num_steps: int, share: float) -> int:
    """Return the step after which round(share * num_steps) steps remain, at least one.

    The noise level there is still high for shifted schedules: 0.95 at share 0.8 and shift 5.
    """
    return num_steps - max(1, round(share * num_steps))


def restore_unmasked(
    x: Float[Tensor, "n *latent"],
    clean: Float[Tensor, "n *latent"],
    noise: Float[Tensor, "n *latent"],
    sigma: Float[Tensor, ""],
    mask: Float[Tensor, "n *mask"],
) -> Float[Tensor, "n *latent"]:
    """Return mask * x + (1 - mask) * noised(clean, noise, sigma), so only the mask is redrawn.

    If `noise` is the initial noise of x, both parts belong to one state. At sigma 0 the region
    outside the mask is the real clip.
    Source: Local-DPO, arXiv:2601.04068, and its code.
    """
    return torch.lerp(add_noise(clean, noise, sigma.expand(len(clean))), x, mask.expand_as(x))


def moving_mask(
    grid: tuple[int, int, int], share: float, num_shapes: int, generator: torch.Generator
) -> Float[Tensor, "F H W"]:
    """Return a binary mask of boxes and ellipses that move and change size over latent frames.

    Exactly round(share * volume) elements are 1, at least one and never all. Centres and sizes are
    interpolated linearly between two random draws. Shapes may overlap and leave the frame.
    Source: Local-DPO, arXiv:2601.04068, but with different shapes: its code draws outlines of one
    to five parts with no fixed area.

    Raises:
        ValueError: The grid has a single element.
    """
    volume = grid[0] * grid[1] * grid[2]
    if volume < 2:
        raise ValueError(f"a latent grid of {grid} has one element: no part of it can be masked")
    count = min(max(1, round(share * volume)), volume - 1)
    distance = torch.stack([_distance(grid, generator) for _ in range(num_shapes)]).amin(0)
    nearest = distance.flatten().argsort(stable=True)[:count]
    return torch.zeros(volume).index_fill(0, nearest, 1.0).view(grid)


def _distance(grid: tuple[int, int, int], generator: torch.Generator) -> Float[Tensor, "F H W"]:
    """Return each element's distance from a moving centre, in units of the shape size."""
    frames, rows, columns = grid
    time = torch.linspace(0, 1, frames)[:, None]
    first, last = torch.rand(2, 2, 2, generator=generator)
    centre, size = (first[i] + (last - first)[i] * time for i in range(2))
    size = 0.25 + 0.75 * size
    y = ((torch.arange(rows) + 0.5) / rows - centre[:, :1]) / size[:, :1]
    x = ((torch.arange(columns) + 0.5) / columns - centre[:, 1:]) / size[:, 1:]
    y, x = torch.broadcast_tensors(y[:, :, None], x[:, None, :])
    is_box = torch.rand((), generator=generator) < 0.5
    return torch.maximum(y.abs(), x.abs()) if is_box else torch.hypot(y, x)


Span = tuple[int, int]
"""Range [start, stop) of frames."""


def split_spans(num_frames: int, length: float) -> list[Span]:
    """Split frames into spans of about `length` frames, as evenly as possible; at least one."""
    count = min(max(1, round(num_frames / length)), num_frames)
    ends = [round(i * num_frames / count) for i in range(count + 1)]
    return list(pairwise(ends))


def temporal_stride(num_frames: int, num_latent: int) -> int:
    """Return the number of frames per latent frame of a causal video VAE.

    The first latent frame encodes only the first frame.

    Raises:
        ValueError: The numbers do not fit a causal VAE.
    """
    if num_latent == 1 and num_frames == 1:
        return 1
    if num_latent < 2 or num_frames < num_latent or (num_frames - 1) % (num_latent - 1):
        raise ValueError(
            f"{num_frames} frames from {num_latent} latent frames: expected 1 + k * "
            f"{num_latent - 1} with a whole number k"
        )
    return (num_frames - 1) // (num_latent - 1)


def find_frames(latent: Span, stride: int) -> Span:
    """Return the span of frames that a span of latent frames encodes."""
    start, stop = latent
    return max(0, 1 + (start - 1) * stride), 1 + (stop - 1) * stride


def compare_with_margin(
    a: Float[Tensor, "m C"], b: Float[Tensor, "m C"], margin: float
) -> Float[Tensor, "m C"]:
    """Return 1 if a is better by more than `margin`, -1 if b is, and 0 for a tie."""
    gap = a - b
    return torch.where(gap.abs() > margin, gap.sign(), 0.0)


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
