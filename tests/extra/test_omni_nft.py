"""OmniNFT: an advantage and a normaliser for each part of a state."""

from dataclasses import replace

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from flowalign.extra.omni_nft import OmniNFT, nft_of_modalities
from flowalign.functional.forward_process import nft
from flowalign.types import Batch, LossContext
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.scored import batch_of, groups, opened
from tests.fixtures.training import context, new_learner, new_rewards

SIZES = [6, 2]
PARTS = {"video": 6, "audio": 2}


def rows(seed, n=3):
    return torch.randn(n, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SIGMA = tensor([0.3, 0.5, 0.9], dtype=torch.float64)


def test_one_part_is_nft_and_two_parts_are_the_mean_of_both():
    policy, old = rows(0), rows(1)
    optimal = tensor([[0.2, 0.9], [0.5, 0.5], [1.0, 0.0]], dtype=torch.float64)
    whole = nft_of_modalities(policy, old, SIGMA, optimal[:, :1], 0.5, [8])
    assert_close(whole, nft(policy, old, SIGMA, optimal[:, 0], 0.5))
    video = nft(policy[:, :6], old[:, :6], SIGMA, optimal[:, 0], 0.5)
    audio = nft(policy[:, 6:], old[:, 6:], SIGMA, optimal[:, 1], 0.5)
    found = nft_of_modalities(policy, old, SIGMA, optimal, 0.5, SIZES)
    assert_close(found, (video + audio) / 2)


def test_a_larger_part_does_not_outweigh_a_smaller_one():
    """Scaling the residuals of one part scales its own loss only, and not its gradient's size."""
    policy = rows(0).requires_grad_()
    optimal = torch.ones(3, 2, dtype=torch.float64)
    scale = tensor([1.0] * 6 + [100.0] * 2, dtype=torch.float64)
    slopes = []
    for factor in (torch.ones_like(scale), scale):
        moved = factor * policy
        loss = nft_of_modalities(moved, moved.detach(), SIGMA, optimal, 1.0, SIZES).sum()
        slopes.append(torch.autograd.grad(loss, moved)[0])
    assert_close(*slopes)


def loss_of(advantage, policy, old, reference=None, kl=0.0):
    columns = {
        "weight": torch.ones(3, dtype=torch.float64),
        "modality_advantage": dict(zip(PARTS, advantage.unbind(1), strict=True)),
        "policy": policy,
        "old": old,
        "sigma": SIGMA,
    }
    columns |= {} if reference is None else {"reference": reference}
    return OmniNFT(kl=kl).loss(Batch(columns), LossContext(modality_sizes=PARTS))


def test_a_reward_of_audio_has_no_gradient_at_the_velocity_of_video():
    policy = rows(0).requires_grad_()
    advantage = tensor([[0.0, 2.0], [0.0, -1.0], [0.0, 5.0]], dtype=torch.float64)
    loss, _ = loss_of(advantage, policy, policy.detach())
    (slope,) = torch.autograd.grad(loss, policy)
    assert slope[:, :6].abs().max() < 1e-12
    assert slope[:, 6:].abs().min() > 1e-6


def test_the_kl_is_a_mean_over_elements_and_then_over_parts():
    policy, reference = rows(0), rows(2)
    zero = torch.zeros(3, 2, dtype=torch.float64)
    plain, _ = loss_of(zero, policy, policy)
    with_kl, stats = loss_of(zero, policy, policy, reference, kl=0.1)
    square = (SIGMA[:, None] * (policy - reference)).square()
    kl = (square[:, :6].mean() + square[:, 6:].mean()) / 2
    assert_close(with_kl - plain, 0.1 * kl)
    assert_close(stats["kl"], kl)


def two_parts():
    policy = PixelPolicy(seed=1)
    policy.modality_sizes = {"video": 2, "audio": 1}
    return policy


ROUTES = {"video": ["redness"], "audio": ["redness", "green"]}


def test_rewards_are_routed_to_the_parts_of_the_state(tmp_path):
    """A part's advantage is the advantage of a run with its rewards alone."""
    both = new_rewards(redness=1.0, green=0.5)
    stream = opened(groups(tmp_path, modalities=ROUTES), new_learner(two_parts()), both)
    examples = batch_of(stream).examples
    for part, rewards in {"video": new_rewards(redness=1.0), "audio": both}.items():
        alone = batch_of(opened(groups(tmp_path), new_learner(two_parts()), rewards)).examples
        assert_close(examples["modality_advantage"][part], alone["advantage"])
    assert_close(examples["advantage"], examples["modality_advantage"]["audio"])


def test_rewards_and_parts_that_do_not_fit_are_refused(tmp_path):
    run = context(two_parts(), new_rewards(redness=1.0, green=0.5))
    data = groups(tmp_path, modalities=ROUTES)
    data.check(run)
    data.plan(run, run.policy.plan(), 1)
    with pytest.raises(ValueError, match="those with a weight are green, redness"):
        groups(tmp_path, modalities={"video": ["redness"], "audio": []}).check(run)
    with pytest.raises(ValueError, match="have the parts none: name all of these, or leave"):
        data.plan(replace(run, policy=PixelPolicy()), run.policy.plan(), 1)
