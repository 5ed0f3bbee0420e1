"""Convert the requests of a step to those of an SGLang-Diffusion server, and its answers back."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.functional.transition import CPS, FlowSDE
from flowalign.sampling.rollout import empty_trajectory
from flowalign.sampling.sampling_settings import Sampling
from flowalign.training.recipe import Sampler
from flowalign.training.rollouts.collecting import RolloutSampler
from flowalign.training.rollouts.rollout_settings import SEVERAL, RolloutSettings
from flowalign.types import InputSpec, Policy, Request, Trajectory, encode_requests
from flowalign.utils.optional import import_optional

KINDS = {FlowSDE: "sde", CPS: "cps"}
"""Names of the server's stochastic steps, by kernel."""
PLAIN = (
    *("tail_ratio", "seeds_per_prompt", "merge", "frame_window", "reward_guidance", "precision"),
    *("branching", "states"),
)
"""Settings of `Sampling` that a server cannot follow."""


def check_sampler(sampler: Sampler) -> RolloutSampler:
    """Return the sampler of a recipe if servers can sample its rollouts.

    Raises:
        ValueError: A server cannot follow a setting, or the reader of its answers is not installed.
    """
    import_optional("msgpack", "sglang")
    if not isinstance(sampler, RolloutSampler):
        _refuse("data without trajectories", "take PolicyGradient, or Matching with ScoredGroups")
    cfg, policy = sampler.cfg, sampler.policy
    _check_sampling(cfg.key, cfg.sampling)
    if any(cfg.observed_states(cfg.window(i)) for i in (0, SEVERAL)):
        _refuse("features for a critic", "choose credit without a critic")
    if policy.input_spec != InputSpec() or policy.user_conditioning:
        _refuse("references, masks and users", "choose a text-to-image or text-to-video policy")
    return sampler


def _check_sampling(key: str, sampling: Sampling) -> None:
    plain = Sampling()
    for name in PLAIN:
        if getattr(sampling, name) != getattr(plain, name):
            _refuse(f"{key}.sampling.{name}", "leave it out")
    if sampling.untrained_steps == "shared_sde":
        _refuse(f"{key}.sampling.untrained_steps shared_sde", "set it to ode or sde")
    if isinstance(sampling.eta, list):
        _refuse(f"a noise level for each step in {key}.sampling.eta", "give one number")
    if type(sampling.kernel) not in KINDS:
        name = type(sampling.kernel).__name__
        _refuse(f"the kernel {name}", "choose FlowSDE or CPS of flowalign.functional")


def _refuse(what: str, remedy: str) -> NoReturn:
    raise ValueError(f"rollouts.sglang does not support {what}: {remedy}, or set it to null")


def rollout_request(
    sampling: Sampling, steps: Sequence[int], request: Request, seed: int, guidance: float
) -> dict[str, Any]:
    """Return the request for the samples of a prompt; `steps` are the trained steps.

    Sample k has the seed `seed + k`. Without a stochastic step, the server samples the ODE.
    """
    stochastic = list(sampling.stochastic(steps))
    kind: dict[str, Any] = {"rollout_sde_type": "ode", "rollout_log_prob_no_const": True}
    if stochastic:
        kind = {
            "rollout_sde_type": KINDS[type(sampling.kernel)],
            "rollout_noise_level": sampling.eta,
            "rollout_log_prob_no_const": sampling.kernel.density == "unit",
            "rollout_sde_step_indices": stochastic,
        }
    return {
        "prompt": request.policy_prompt,
        "negative_prompt": "",
        "seed": seed,
        "num_inference_steps": sampling.num_steps,
        "num_outputs_per_prompt": sampling.samples_per_prompt,
        "guidance_scale": guidance,
        "rollout": True,
        "rollout_debug_mode": False,
        "rollout_return_dit_trajectory": True,
        "suppress_logs": True,
        **kind,
    }


def first_seed(seed: int, step: int, place: int, prompts: int, samples: int) -> int:
    """Return the seed of the first sample of a prompt; no two samples of a run share a seed."""
    return (((seed % 2**15) << 32) + step * prompts + place) * samples


class SampleReader:
    """Reader of the server's samples of one rollout setting."""

    def __init__(self, policy: Policy, num_steps: int):
        self.policy, self.num_steps = policy, num_steps
        self.shape = policy.plan().latent_shape
        self.sigmas = policy.schedule(num_steps)

    def read(self, asked: Mapping[str, Any], entries: Any) -> list[dict[str, Tensor]]:
        """Return latents [T+1, ...], log-probabilities [T], sigmas [T+1] and media of each sample.

        Raises:
            ValueError: The answer does not fit the request or the policy.
        """
        count = asked["num_outputs_per_prompt"]
        if not isinstance(entries, list) or len(entries) != count:
            raise ValueError(f"the answer does not have {count} samples")
        return [self._read_entry(asked, entry) for entry in entries]

    def _read_entry(self, asked: Mapping[str, Any], entry: Any) -> dict[str, Tensor]:
        for name in ("prompt", "seed"):
            if entry.get(name) != asked[name]:
                raise ValueError(f"the {name} is {entry.get(name)!r}, asked was {asked[name]!r}")
        path = entry.get("dit_trajectory") or {}
        found = {
            "latents": path.get("latents"),
            "sigmas": path.get("sigmas"),
            "logp": entry.get("rollout_log_probs"),
            "media": entry.get("generated_output"),
        }
        missing = [name for name, value in found.items() if not isinstance(value, Tensor)]
        if missing:
            raise ValueError(f"the answer lacks the tensors {', '.join(missing)}")
        found = {name: value.float() for name, value in found.items()}
        wanted = (self.num_steps + 1, *self.shape)
        if tuple(found["latents"].shape) != wanted:
            raise ValueError(
                f"the latents have shape {list(found['latents'].shape)}, the policy's have "
                f"{list(wanted)}: set height and width in rollouts.sglang.sampling_params, or "
                "choose a model with equal latents"
            )
        self._check_schedule(found["sigmas"])
        if found["logp"].shape != (self.num_steps,) or not found["latents"].isfinite().all():
            raise ValueError("log-probabilities do not have one value per step, or latents are NaN")
        return found

    def _check_schedule(self, sigmas: Tensor) -> None:
        own = self.sigmas.cpu()
        if sigmas.shape != own.shape or not torch.allclose(sigmas, own, rtol=0, atol=1e-3):
            shown = [[round(x, 3) for x in value.tolist()] for value in (sigmas, own)]
            raise ValueError(
                f"the server's noise levels are {shown[0]}, the policy's {shown[1]}: start the "
                "server with the policy's schedule, or set its shift in "
                "rollouts.sglang.sampling_params"
            )


def to_trajectory(
    cfg: RolloutSettings,
    steps: Sequence[int],
    policy: Policy,
    requests: Sequence[Request],
    samples: Sequence[Mapping[str, Tensor]],
) -> Trajectory:
    """Return the trajectories of all samples of the requests, on the policy's device."""
    cond = encode_requests(policy, requests)
    device = next(iter(cond.values())).device
    # Sigmas are the server's, because its states and log-probabilities belong to them.
    empty = empty_trajectory(cfg.sampling, steps, requests, samples[0]["sigmas"].to(device))
    latents = torch.stack([sample["latents"] for sample in samples], 1)
    logp = torch.stack([sample["logp"] for sample in samples]).to(device)
    kept = cfg.kept_states(steps)
    means = {k: latents[k + 1].to(device) for k in (steps if cfg.needs_means else ())}
    return replace(
        empty,
        logp=torch.where(empty.eta > 0, logp, 0.0),
        cond=cond,
        states={k: latents[k].to(device) for k in kept},
        means=means,  # replaced by means of the training process's network before they are used
    )


def as_media(samples: Sequence[Mapping[str, Tensor]]) -> Float[Tensor, "n F 3 H W"]:
    """Return the media that the server decoded.

    Raises:
        ValueError: They are not images [3, H, W] or clips [3, F, H, W] in [0, 1].
    """
    media = torch.stack([sample["media"] for sample in samples])
    frames = media[:, :, None] if media.ndim == 4 else media
    if frames.ndim != 5 or frames.shape[1] != 3:
        raise ValueError(f"media have shape {list(media.shape[1:])}, not [3, (F,) H, W]")
    if not 0 <= float(frames.min()) <= float(frames.max()) <= 1 + 1e-3:
        raise ValueError(
            f"media range from {frames.min():.3g} to {frames.max():.3g}, not in [0, 1]"
        )
    return frames.transpose(1, 2).clamp(0, 1)


def relative_distance(a: Tensor, b: Tensor) -> float:
    """Return |a - b| / |b| over all elements."""
    return float((a - b).norm() / b.norm().clamp(min=math.ulp(1.0)))
