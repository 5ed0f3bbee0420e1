"""What the denoising steps of one training step have earned: recorded as JSON and drawn as PNG."""

import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.credit.outcome import Outcome
from flowalign.media.grids import grid
from flowalign.media.thumbnails import bytes_of, first_to_last, reduced
from flowalign.reports.credit_chart import MOST_ROWS, CreditRecord, draw
from flowalign.sampling.branching import Branching, Chain
from flowalign.sampling.completion import Tail
from flowalign.training.policy_gradient.advantages import Judged
from flowalign.training.policy_gradient.state_values import StateValues
from flowalign.types import CreditEstimator, Policy, Trajectory
from flowalign.utils.files import write_text

_LARGEST = 160
"""Pixels; the longer side of a picture is reduced to this."""
_QUARTERS = 4
"""Frames shown of a clip."""


def worth_a_picture(credit: CreditEstimator, branching: Branching) -> bool:
    """Not where every step of a sample earns its outcome: the samples show that already."""
    return not (isinstance(credit, Outcome) and isinstance(branching, Chain))


class CreditPictures:
    """Keeps what a due step has earned, and writes it once the step is over.

    Due are the first step, the last, and those after which an evaluation falls due.
    """

    def __init__(self, folder: Path, credit: CreditEstimator, num_steps: int, every: int):
        self.folder, self.credit = folder, credit
        self.num_steps, self.every = num_steps, every
        self.kept: tuple[int, Judged] | None = None

    def __call__(self, step: int, judged: Judged) -> None:
        """Keep what this rank has judged, if the step is due."""
        after = step + 1
        if step == 0 or after == self.num_steps or (self.every and after % self.every == 0):
            self.kept = step, judged

    def write(self) -> float:
        """Write `step-NNNNNN.json` and `.png` of the step that was kept; seconds that it took."""
        if self.kept is None:
            return 0.0
        start, (step, judged) = time.perf_counter(), self.kept
        self.kept = None
        self.folder.mkdir(parents=True, exist_ok=True)
        content, pictures = record(step, self.credit, judged), shown(judged)
        file = self.folder / f"step-{step:06}.json"
        write_text(file, json.dumps(asdict(content), allow_nan=False) + "\n")
        draw(content, pictures, file.with_suffix(".png"))
        return time.perf_counter() - start


def record(step: int, credit: CreditEstimator, judged: Judged) -> CreditRecord:
    """Values, credit and advantages of the first prompt's samples."""
    trajectory, values, earned = judged.batch.trajectory, judged.values, judged.earned
    size = trajectory.group_size
    rewards, tails = values.rewards, shown_states(values)
    known = [values.known[tail].values[trajectory.places(tail[0])[:size]] for tail in tails]
    gained = weighted(earned.value[:size], rewards.weights)
    gained = torch.where(earned.mask[:size], gained, torch.nan)
    advantage = torch.where(judged.batch.mask[:size], judged.batch.advantage[:size], torch.nan)
    return CreditRecord(
        step=step,
        prompt=trajectory.prompts[0],
        method=type(credit).__name__,
        rule=(type(credit).__doc__ or "").partition("\n")[0],
        weights={
            name: weight
            for name, weight in zip(rewards.dims, _rounded(rewards.weights), strict=True)
            if weight
        },
        sigmas=_rounded(trajectory.sigmas),
        states=[k for k, _ in tails],
        values=_rounded(weighted(torch.stack(known, 1), rewards.weights)),
        credit=_rounded(gained),
        advantage=_rounded(advantage),
        marked=None if earned.marked is None else earned.marked[:size].tolist(),
        origin=trajectory.origin[:size].tolist() if branches(trajectory) else None,
    )


def shown(judged: Judged) -> dict[int, list[np.ndarray]]:
    """By state, small pictures of what the ODE makes of it, for the first samples of the prompt.

    Of samples that branch, the finished pictures alone, but of all of them.
    """
    trajectory, values = judged.batch.trajectory, judged.values
    end = trajectory.num_steps
    if branches(trajectory):
        count = min(trajectory.group_size, MOST_ROWS)
        final = trajectory.state(end, slice(count))
        return {end: _decoded(values.policy, final, values.micro_batch)}
    count = min(trajectory.group_size, values.pictured)
    return {
        tail[0]: [_small(media) for media in values.media[tail][:count]]
        for tail in shown_states(values)
    }


def shown_states(values: StateValues) -> list[Tail]:
    """The valued states, in order; of several completions of one the recipe's, else the first."""
    chosen: dict[int, Tail] = {}
    for tail in sorted(values.known, key=lambda tail: (tail[0], tail[1] != values.how)):
        chosen.setdefault(tail[0], tail)
    return list(chosen.values())


def branches(trajectory: Trajectory) -> bool:
    """Whether samples share noisy steps, or are noisy in different ones."""
    noisy = (trajectory.eta > 0).cpu()
    return bool((trajectory.trained != noisy).any() or (noisy != noisy[:1]).any())


def weighted(value: Float[Tensor, "*n R"], weights: Float[Tensor, "R"]) -> Float[Tensor, "*n"]:
    """Sum over the reward dimensions that count; NaN where one of these is."""
    counts = weights != 0
    return value[..., counts] @ weights[counts]


@torch.no_grad()
def _decoded(policy: Policy, x: Float[Tensor, "n *latent"], size: int) -> list[np.ndarray]:
    return [_small(media) for part in x.float().split(size) for media in policy.decode(part).cpu()]


def _small(media: Float[Tensor, "F 3 H W"]) -> np.ndarray:
    """H x W x 3, 0 to 255: of a clip four frames from the first to the last, in two rows."""
    if len(media) < _QUARTERS:
        return _pixels(reduced(media[len(media) // 2 :][:1], _LARGEST))
    frames = media[first_to_last(len(media), _QUARTERS)]
    return _pixels(grid(reduced(frames, _LARGEST // 2), 2)[None])


def _pixels(picture: Float[Tensor, "1 3 H W"]) -> np.ndarray:
    return bytes_of(picture)[0].permute(1, 2, 0).numpy()


def _rounded(numbers: Tensor) -> list[Any]:
    """To four significant digits; null for what is not finite."""

    def plain(number: Any) -> Any:
        if isinstance(number, list):
            return [plain(part) for part in number]
        return float(f"{number:.4g}") if math.isfinite(number) else None

    return [plain(part) for part in numbers.tolist()]
