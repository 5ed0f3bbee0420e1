"""Generate Local-DPO pairs: a real video wins against itself, regenerated in a moving mask.

It needs no annotation.
Source: Local-DPO, arXiv:2601.04068, and its code. There the real video is restored outside the mask
before every step. Here it is also restored after the last step, so the latents of a pair differ
only inside the mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from flowalign.extra.clip_pairs.corruption import moving_mask, step_at_share
from flowalign.extra.clip_pairs.denoiser import ClipRegenerator, Clips
from flowalign.extra.clip_pairs.method import ClipPair, PairGenerator, Results, Side
from flowalign.rewards.composite import Rewards
from flowalign.types.ranges import PositiveInt, UnitInterval, require_ranges


@dataclass(frozen=True, kw_only=True)
class LocalPairs(PairGenerator):
    """Generator with the real video as winner; the loser's latents differ only inside a mask."""

    strengths: Sequence[UnitInterval] = (0.75, 0.8, 0.85)
    """Shares of the sampler's steps that denoise the loser, in (0.6, 1]; each video draws one.
    Training weighs larger ones more, see `readers.local_dpo.emphasis`."""
    share: tuple[UnitInterval, UnitInterval] = (0.1, 0.5)
    """Range of the share of latent positions that the mask covers, in (0, 1), drawn per video. The
    default is our choice."""
    max_shapes: PositiveInt = 5
    """Largest number of boxes and ellipses in a mask; at least one is drawn."""

    def __post_init__(self) -> None:
        """Raise ValueError for masks that change nothing, or strengths that training rejects."""
        require_ranges(self, "method")
        if not self.strengths or not all(0.6 < s <= 1 for s in self.strengths):
            raise ValueError(f"method.strengths are {[*self.strengths]}; each must be in (0.6, 1]")
        low, high = self.share
        if not 0 < low <= high < 1:
            raise ValueError(f"method.share is {self.share}; it must increase within (0, 1)")

    @override
    def check(self, rewards: Rewards) -> None:
        if rewards.models:
            raise ValueError("method LocalPairs needs no reward: remove rewards from the run file")

    @override
    def make(self, regenerator: ClipRegenerator, clips: Clips) -> Results:
        _, _, frames, height, width = clips.latents.shape
        strengths, masks = [], []
        for draw in regenerator.make_generators("mask", clips):
            which = int(torch.randint(len(self.strengths), (), generator=draw))
            shapes = 1 + int(torch.randint(self.max_shapes, (), generator=draw))
            low, high = self.share
            share = low + (high - low) * float(torch.rand((), generator=draw))
            strengths.append(self.strengths[which])
            masks.append(moving_mask((frames, height, width), share, shapes, draw))
        starts = torch.tensor([step_at_share(regenerator.num_steps, s) for s in strengths])
        mask = torch.stack(masks)[:, None].to(clips.latents)
        noise = regenerator.draw_noise("noise", clips)
        losers = regenerator.regenerate(clips, noise, starts, mask)
        media = regenerator.decode(torch.cat([clips.latents, losers])).chunk(2)
        return [
            ClipPair(
                {
                    "positive": Side(clips.latents[i], media[0][i]),
                    "negative": Side(losers[i], media[1][i]),
                },
                {"strength": strengths[i]},
                masks[i],
            )
            for i in range(len(clips.numbers))
        ]
