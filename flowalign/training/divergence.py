"""Measure how far policy and samples moved from the initial model, and warn if samples degrade.

Distance to the base: MEND, arXiv:2610.05954, which embeds images with DreamSim.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan
from pathlib import Path
from typing import Annotated, Any

import torch
from jaxtyping import Float
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import normalize

from flowalign.functional.noise_matching import add_noise, sample_error
from flowalign.rewards.composite import Rewards
from flowalign.sampling.inference import encode_once
from flowalign.sampling.stepping import evaluate_velocity
from flowalign.types import (
    EmbedsImages,
    MediaBatch,
    Policy,
    PromptConditioning,
    Request,
    RewardModel,
    VelocityField,
)
from flowalign.utils.files import atomic_write
from flowalign.utils.media.pixels import reduce_size, spread_frames, to_bytes
from flowalign.utils.ranges import Range, Settings, UnitInterval
from flowalign.utils.seeds import generator

LEVELS = 4
"""Number of noise levels of each sample."""
PIXELS, BASE = "pixel_distance", "base_samples.safetensors"
"""Name of the distance of pixels, and file of the samples before training."""
_SIDE, _FRAMES = 64, 4
"""Longer side, and number of frames, of the images that the distance of pixels compares."""


@torch.no_grad()
def measure_divergence(
    policy: Policy,
    reference: VelocityField,
    requests: Sequence[Request],
    latents: Float[Tensor, "n *latent"],
    indices: Sequence[int],
    seed: int,
    micro_batch: int,
    conditioning: PromptConditioning | None = None,
) -> Float[Tensor, "n"]:
    """Return the mean squared difference between the velocities of policy and reference.

    The KL divergence of the two flows is a weighted integral of it over noise levels. Every sample
    is noised to the levels (k + 0.5) / 4, because levels differ more than prompts do. The noises
    belong to the indices of samples in the evaluation. A sample costs eight evaluations.
    """
    if conditioning:
        requests = [conditioning.for_inference(request) for request in requests]
    cond, row = encode_once(policy, requests)
    row = row.to(latents.device)
    generators = [generator(seed, "divergence", i) for i in indices]
    errors = []
    for k in range(LEVELS):
        noise = torch.cat([policy.noise(1, own) for own in generators]).to(latents)
        sigma = latents.new_full((len(latents),), (k + 0.5) / LEVELS)
        x = add_noise(latents, noise, sigma)
        ours, theirs = (
            evaluate_velocity(field, x, sigma, cond, row, micro_batch)
            for field in (policy, reference)
        )
        errors.append(sample_error((ours - theirs).float()))
    return torch.stack(errors).mean(0).cpu()


def list_encoders(models: Sequence[RewardModel]) -> list[EmbedsImages]:
    """Return the reward models that embed images."""
    return [model for model in models if isinstance(model, EmbedsImages)]


def list_distances(models: Sequence[RewardModel]) -> list[str]:
    """Return the names of the distances that a run measures: of every encoder, and of pixels."""
    return [*map(_name, list_encoders(models)), PIXELS]


def _name(model: EmbedsImages) -> str:
    return f"{model.spec.name}_distance"


def plan_distance(models: Sequence[RewardModel], num_samples: int) -> str:
    """Return what the distances cost: no samples, but a file of the samples before training."""
    names = " and ".join(list_distances(models)).replace("_", " ")
    most = num_samples * 3 * _FRAMES * _SIDE**2 / 1e6
    return f"{names}; no extra samples, up to {most:.3g} MB on disk"


def describe_media(rewards: Rewards, batch: MediaBatch) -> dict[str, Tensor]:
    """Return what the distances compare by name: small 8-bit images, and embeddings."""
    frames = batch.media[:, spread_frames(batch.media.shape[1], _FRAMES)]
    small = reduce_size(frames.flatten(0, 1), _SIDE).unflatten(0, frames.shape[:2])
    found = {PIXELS: to_bytes(small)}
    for model in list_encoders(rewards.models):
        leads = rewards.ranks is None or rewards.ranks.is_leader
        thread = rewards.worker(model).thread  # a model is never called by two threads
        own: Any = thread.submit(model.embed, batch).result().float().cpu() if leads else None
        found[_name(model)] = rewards.ranks.broadcast_first(own) if rewards.ranks else own
    return found


def measure_distance(
    base: Mapping[str, Tensor], now: Mapping[str, Tensor], requests: Sequence[Request]
) -> dict[str, float]:
    """Return the distances between two samples with the same request and initial noise.

    An encoder's distance is 1 - cos of the embeddings, that of pixels is their root-mean-square
    difference in [0, 1]. Distances are averaged over the samples of a request, then over requests.
    """
    found, groups = {}, group_rows(requests)
    for name in (name for name in now if name in base):
        old, new = (x[name].flatten(1).float() for x in (base, now))
        if name == PIXELS:
            each = ((new - old) / 255).square().mean(1).sqrt()
        else:  # equals 1 - cos, and is exactly 0 for equal embeddings
            each = (normalize(new) - normalize(old)).square().sum(1) / 2
        means = torch.stack([each[same].mean() for same in groups])
        found[f"eval/{name}"] = float(means.mean())
    return found


def distance_to_base(
    folder: Path,
    done: int,
    sampling: str,
    now: Mapping[str, Tensor],
    requests: Sequence[Request],
) -> dict[str, float]:
    """Return the distances to the samples before training, which are kept in `folder`.

    `sampling` identifies requests, initial noises and sampler. The result is empty if the run began
    with another `sampling`, or with a version that kept no samples.
    """
    path, identity = folder / BASE, {"sampling": sampling}
    if done == 0:
        with atomic_write(path) as partial:
            save_file({name: each.contiguous() for name, each in now.items()}, partial, identity)
    if not path.exists():
        return {}
    with safe_open(path, "pt") as file:
        same = file.metadata() == identity
        base = {name: file.get_tensor(name) for name in file.keys()} if same else {}  # noqa: SIM118
    return measure_distance(base, now, requests)


def diversity(latents: Float[Tensor, "n *latent"], requests: Sequence[Request]) -> float:
    """Return the root-mean-square distance per latent element between samples of one request.

    It is averaged over all pairs, and NaN if no request has two samples. It falls if the policy
    suffers from mode collapse.
    """
    flat = latents.flatten(1).float()
    distances = [torch.pdist(flat[same]) / flat.shape[1] ** 0.5 for same in group_rows(requests)]
    return float(torch.cat(distances).mean())


def group_rows(requests: Sequence[Request]) -> list[list[int]]:
    """Return the rows of each distinct request."""
    rows = defaultdict[Request, list[int]](list)
    for i, request in enumerate(requests):
        rows[request].append(i)
    return list(rows.values())


_SIGNS = {
    "diversity": "samples of one prompt become similar",
    "sharpness": "lower values mean blur; higher values mean noise or more contrast",
}


@dataclass(frozen=True, kw_only=True)
class SampleBounds(Settings, key="evaluation.bounds"):
    """Bounds of the diversity and sharpness of held-out samples, relative to the initial model.

    A quantity that was 0 or not measured before training gives no warning.
    """

    least_diversity: UnitInterval = 0.5
    """Smallest diversity, relative to the initial model. 0: no bound."""
    least_sharpness: UnitInterval = 0.7
    """Smallest sharpness, relative to the initial model. 0: no bound. For comparison, a Gaussian
    blur of 0.5 pixels reduces the sharpness of Shapes, the bundled toy model, to 0.47."""
    most_sharpness: Annotated[float, Range(least=1)] = 1.5
    """Largest sharpness, relative to the initial model. For comparison, guidance 2.5 raises the
    sharpness of Shapes to 1.21, and noise of 0.05 raises it to 2.06."""

    def warnings(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
        """Return a warning for each quantity out of bounds, by name, from two evaluations."""
        bounds = {
            "diversity": (self.least_diversity, inf),
            "sharpness": (self.least_sharpness, self.most_sharpness),
        }
        found = {}
        for name, (least, most) in bounds.items():
            values = (metrics.get(f"eval/{name}") for metrics in (before, now))
            was, value = (nan if value is None else value for value in values)
            if 0 < was < inf and not least <= value / was <= most:
                allowed = f"{least:g} to {most:g}" if most < inf else f"at least {least:g}"
                found[name] = (
                    f"{name} is {value:.3g}, {value / was:.2f} of the {was:.3g} before training; "
                    f"expected {allowed} of it: {_SIGNS[name]}"
                )
        return found

    def last_warnings(self, rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
        """Return the last warning of each quantity in a run, with its step."""
        found: dict[str, str] = {}
        evaluated = {row["evaluated_after"]: row for row in rows if "evaluated_after" in row}
        for done, row in sorted(evaluated.items()):
            found_now = self.warnings(evaluated.get(0, {}), row)
            found |= {name: f"after {done:g} steps {text}" for name, text in found_now.items()}
        return found
