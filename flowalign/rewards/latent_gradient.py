"""Compute the gradient of the reward loss with respect to the scored latents."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowalign.rewards.composite import Rewards
from flowalign.types import MediaBatch, Policy, Request, RewardOutput

Scorer = Callable[[MediaBatch], RewardOutput]
"""Function that returns all dimensions of the weighted rewards, differentiable in the media."""


@dataclass(frozen=True)
class LatentGradient:
    """Rewards of some latents, with the gradient of the loss."""

    gradient: Float[Tensor, "n *latent"]
    """Gradient of each sample's loss; 0 if a reward failed."""
    loss: Float[Tensor, "n"]
    """Loss of each sample; 0 if a reward failed."""
    total: Float[Tensor, "n"]
    """Weighted reward of each sample; NaN if a reward failed."""
    output: RewardOutput
    """Scores, without a gradient."""


def latent_gradient(
    policy: Policy,
    rewards: Rewards,
    score: Scorer,
    loss: Callable[[Tensor], Tensor],
    clean: Float[Tensor, "n *latent"],
    requests: Sequence[Request],
    frames: Sequence[int] | None = None,
) -> LatentGradient:
    """Decode and score latents, and return the gradient of the loss in the latents.

    The graph of decoder and rewards is freed. A sample with a non-finite reward or gradient counts
    as failed and does not affect other samples.
    """
    leaf = clean.detach().requires_grad_()
    with torch.enable_grad():
        output, total = score_latents(policy, rewards, score, leaf, requests, frames)
        usable = rewards.usable(output.valid)
        each = loss(total) * usable
        gradient = torch.zeros_like(leaf)
        if each.requires_grad:
            gradient = torch.autograd.grad(each.sum(), leaf)[0]
    finite = gradient.flatten(1).isfinite().all(1)
    usable = usable & finite.cpu()
    output = _with_failures(output, finite.cpu())
    kept = usable.to(leaf.device).reshape(-1, *[1] * (leaf.ndim - 1))
    return LatentGradient(
        gradient=torch.where(kept, gradient, 0.0),
        loss=torch.where(usable, each.detach(), 0.0),
        total=torch.where(usable, total.detach(), torch.nan),
        output=output,
    )


def score_latents(
    policy: Policy,
    rewards: Rewards,
    score: Scorer,
    latents: Float[Tensor, "n *latent"],
    requests: Sequence[Request],
    frames: Sequence[int] | None = None,
) -> tuple[RewardOutput, Float[Tensor, "n"]]:
    """Decode and score latents, and return all dimensions and the weighted rewards.

    A failed dimension counts as 0 in the weighted reward.
    """
    assert policy.renderer, "a recipe refuses policies that cannot render"
    media = policy.renderer.render(latents, frames)
    rewards.costs.decodes += len(media)
    fps = policy.fps if media.shape[1] > 1 else None
    output = score(rewards.batch(media, requests, fps=fps))
    return output, (output.values.nan_to_num() * rewards.weights).sum(1)


def _with_failures(output: RewardOutput, finite: Bool[Tensor, "n"]) -> RewardOutput:
    """Return detached scores; samples with a non-finite gradient are marked as failed."""
    values, bad = output.values.detach(), (~finite).nonzero().flatten().tolist()
    reasons = dict.fromkeys(bad, "the gradient of its rewards is not finite") | dict(output.reasons)
    failed = ~finite[:, None]
    return replace(
        output,
        values=values.masked_fill(failed, torch.nan),
        valid=output.valid & ~failed,
        reasons=reasons,
    )


def check_gradients(rewards: Rewards, needed_by: str) -> None:
    """Raise ValueError if a weighted reward has no gradient; `needed_by` is for the message."""
    weighted = rewards.weighted().models
    flat = [model.spec for model in weighted if not model.spec.differentiable]
    if not flat:
        return
    other = [dim for m in rewards.models if m.spec.differentiable for dim in m.spec.dims]
    zeros = ", ".join(f"{dim}: 0" for dim in flat[0].dims)
    advice = (
        f"Set `weight: {{{zeros}}}` in its entry of rewards, so that it is only logged, and weigh "
        f"{', '.join(other)}."
        if other
        else "Name a reward with a gradient in rewards, such as PickScore, HPSv2, ImageReward or "
        "TrainedReward of reward_models, or layer configs/tasks/hpsv2.yaml last."
    )
    raise ValueError(
        f"rewards: {flat[0].name!r} ({', '.join(flat[0].dims)}) has a weight but no gradient, "
        f"which {needed_by} needs.\n{advice}"
    )
