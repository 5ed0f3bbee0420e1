"""Record the credit of the denoising steps of one training step, with small images."""

import json
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.credit.chain import Outcome
from flowalign.sampling.branching import Branching, Chain
from flowalign.training.policy_gradient.batches import RolloutBatch
from flowalign.training.rollouts.state_values import CompletionValues
from flowalign.types import CreditEstimator, Policy, StepCredit, Trajectory
from flowalign.types.trajectory import CompletionRequest
from flowalign.utils.files import write_text
from flowalign.utils.media.encode import arrange_grid, write_picture
from flowalign.utils.media.pixels import reduce_size, spread_frames
from flowalign.utils.tracking import MAX_ROWS, PLACES, CreditRecord

_LARGEST = 160
"""Longer side of a reduced image, in pixels."""
_BLUE, _ORANGE = (0, 114, 178), (213, 94, 0)
"""Colours of positive and negative advantages in maps."""
_MAP_DIMS = 4
_QUARTERS = 4
"""Number of frames shown per video."""


def differs_from_outcome(credit: CreditEstimator, branching: Branching) -> bool:
    """Return whether the credit of steps can differ from the outcome of the sample."""
    return not (isinstance(credit, Outcome) and isinstance(branching, Chain))


@dataclass(frozen=True)
class StepResult:
    """Samples, values and credit of this rank in one step, before the update."""

    batch: RolloutBatch
    """Transitions with their advantages."""
    credit: StepCredit
    """Credit before normalisation."""
    values: CompletionValues
    """Values of the states, with their trajectories."""


class CreditRecorder:
    """Recorder that writes the credit of some training steps to files.

    It records the first step, the last step, and each step before an evaluation.
    """

    def __init__(self, folder: Path, credit: CreditEstimator, num_steps: int, every: int):
        self.folder, self.credit = folder, credit
        self.num_steps, self.every = num_steps, every
        self.kept: tuple[int, StepResult] | None = None

    def __call__(self, step: int, result: StepResult) -> None:
        """Store the credit of this rank if the step is recorded."""
        after = step + 1
        if step == 0 or after == self.num_steps or (self.every and after % self.every == 0):
            self.kept = step, result

    def draw(self) -> float:
        """Write `step-NNNNNN.json` and `.png` of the stored step, and return the seconds spent."""
        if self.kept is None:
            return 0.0
        start, (step, result) = time.perf_counter(), self.kept
        self.kept = None
        self.folder.mkdir(parents=True, exist_ok=True)
        images = images_of(result)
        by_sample = torch.stack(list(images.values()), 1)
        file = self.folder / f"step-{step:06}.json"
        content = record(step, self.credit, result)
        content = replace(content, image_states=list(images), num_images=len(by_sample))
        # Images are written first, because the report shows a record only with its images.
        write_picture(file.with_suffix(".png"), arrange_grid(by_sample.flatten(0, 1), len(images)))
        if "places" in result.batch.samples:
            maps, content = draw_places(result.batch, content)
            grid = arrange_grid(maps.flatten(0, 1), len(content.place_steps))
            write_picture(file.with_name(PLACES.format(file.stem)), grid)
        write_text(file, json.dumps(asdict(content), allow_nan=False) + "\n")
        return time.perf_counter() - start


def record(step: int, method: CreditEstimator, result: StepResult) -> CreditRecord:
    """Return values, credit and advantages of the first prompt's samples."""
    trajectory, values, credit = result.batch.trajectory, result.values, result.credit
    size = trajectory.group_size
    rewards, requests = values.rewards, select_states(values)
    known = [
        values.known[request].values[trajectory.rows.row_index(request[0])[:size]]
        for request in requests
    ]
    gained = weigh_rewards(credit.value[:size], rewards.weights)
    gained = torch.where(credit.mask[:size], gained, torch.nan)
    advantage = torch.where(result.batch.mask[:size], result.batch.advantage[:size], torch.nan)
    return CreditRecord(
        step=step,
        prompt=trajectory.requests[0].prompt,
        method=type(method).__name__,
        rule=(type(method).__doc__ or "").partition("\n")[0],
        weights={
            name: weight
            for name, weight in zip(rewards.dims, _round(rewards.weights), strict=True)
            if weight
        },
        sigmas=_round(trajectory.sigmas),
        states=[k for k, _ in requests],
        values=_round(weigh_rewards(torch.stack(known, 1), rewards.weights)),
        credit=_round(gained),
        advantage=_round(advantage),
        marked=None if credit.marked is None else credit.marked[:size].tolist(),
        source_row=trajectory.rows.source_row[:size].tolist() if branches(trajectory) else None,
    )


def images_of(result: StepResult) -> dict[int, Float[Tensor, "n 3 h w"]]:
    """Return small images of the completed states of the prompt's first samples, by state.

    If samples branch, the result has only finished images, but of all samples.
    """
    trajectory, values = result.batch.trajectory, result.values
    end = trajectory.num_steps
    if branches(trajectory):
        count = min(trajectory.group_size, MAX_ROWS)
        final = trajectory.state(end, slice(count))
        return {end: _decode(values.policy, final, values.micro_batch)}
    count = min(trajectory.group_size, values.pictured)
    return {
        request[0]: torch.stack([_small(media) for media in values.media[request][:count]])
        for request in select_states(values)
    }


def draw_places(
    batch: RolloutBatch, content: CreditRecord
) -> tuple[Float[Tensor, "n T 3 h w"], CreditRecord]:
    """Return maps of the advantages of latent positions, and the record with their scale.

    Maps are of the samples and steps that the record shows: white is 0, blue above, and orange
    below. Maps of videos are means over frames.
    """
    steps = [k for k in content.trained if bool(batch.mask[: content.num_images, k].any())]
    places = batch.samples["places"][: content.num_images, steps, 0].float().cpu()
    while places.ndim > _MAP_DIMS:
        places = places.mean(2)
    most = max(float(places.abs().max()), 1e-12)
    signs = torch.tensor([_BLUE, _ORANGE]) / 255
    ink = torch.where((places > 0)[..., None], signs[0], signs[1])
    strength = (places.abs() / most)[..., None]
    maps = (1 - strength + strength * ink).movedim(-1, 2)
    factor = max(1, _LARGEST // 2 // max(maps.shape[-2:]))
    maps = maps.repeat_interleave(factor, -1).repeat_interleave(factor, -2)
    return maps, replace(content, place_steps=steps, place_scale=float(f"{most:.4g}"))


def select_states(values: CompletionValues) -> list[CompletionRequest]:
    """Return the valued states in order, with one completion each.

    The recipe's completion is preferred if a state has several.
    """
    chosen: dict[int, CompletionRequest] = {}
    for request in sorted(values.known, key=lambda known: (known[0], known[1] != values.how)):
        chosen.setdefault(request[0], request)
    return list(chosen.values())


def branches(trajectory: Trajectory) -> bool:
    """Return whether samples share stochastic steps, or differ in their stochastic steps."""
    noisy = (trajectory.eta > 0).cpu()
    return bool(trajectory.shared.any() or (noisy != noisy[:1]).any())


def weigh_rewards(value: Float[Tensor, "*n R"], weights: Float[Tensor, "R"]) -> Float[Tensor, "*n"]:
    """Return the weighted sum of rewards; NaN if a dimension with a weight is NaN."""
    counts = weights != 0
    return value[..., counts] @ weights[counts]


@torch.no_grad()
def _decode(policy: Policy, x: Float[Tensor, "n *latent"], size: int) -> Float[Tensor, "n 3 h w"]:
    parts = x.float().split(size)
    return torch.stack([_small(media) for part in parts for media in policy.decode(part).cpu()])


def _small(media: Float[Tensor, "F 3 H W"]) -> Float[Tensor, "3 h w"]:
    """Return a small image; for a video, a grid of four frames from the first to the last."""
    if len(media) < _QUARTERS:
        return reduce_size(media[len(media) // 2 :][:1], _LARGEST)[0]
    frames = media[spread_frames(len(media), _QUARTERS)]
    return arrange_grid(reduce_size(frames, _LARGEST // 2), 2)


def _round(numbers: Tensor) -> list[Any]:
    """Return numbers rounded to four significant digits, and None for non-finite numbers."""

    def plain(number: Any) -> Any:
        if isinstance(number, list):
            return [plain(part) for part in number]
        return float(f"{number:.4g}") if math.isfinite(number) else None

    return [plain(part) for part in numbers.tolist()]
