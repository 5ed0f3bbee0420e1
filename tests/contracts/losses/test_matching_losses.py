"""Properties that every matching loss must satisfy."""

from dataclasses import replace

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from flowalign.types import Examples, LossContext, Residuals
from tests.fixtures.matching_losses import LOSSES

every = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)

PAIRED = {k: v for k, v in LOSSES.items() if v.requirements.paired}
of_pairs = pytest.mark.parametrize("loss", PAIRED.values(), ids=PAIRED)
ROWS = {k: v for k, v in LOSSES.items() if not v.requirements.paired}
of_rows = pytest.mark.parametrize("loss", ROWS.values(), ids=ROWS)


def draw(n=8, frames=3, seed=0):
    """Errors and examples of n rows, pairs where n is even, that share no number.

    The policy has gained on the reference, and most losers are like their winners.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shape = (n, 2, frames, 3, 5)
    m = n // 2
    reference = normal(*shape)
    alike = tensor([1.4, 0.6, -1.1, 0.9])[:m].reshape(-1, 1, 1, 1, 1)
    reference[m : 2 * m] = alike * reference[:m] + 0.4 * reference[m : 2 * m]
    residuals = Residuals(0.8 * reference + 0.3 * normal(*shape), reference)
    labels = tensor([1.0, 0.0, 1.0] * 4, dtype=torch.float64)
    mask = normal(m, *shape[1:]).abs()
    batch = Examples(
        latents=normal(*shape),
        cond={},
        paired=n % 2 == 0,
        weight=(normal(m).abs() + 0.5).repeat(2) if n % 2 == 0 else normal(n).abs() + 0.5,
        desirable=torch.arange(n) < m,
        scores={"text": normal(n), "unused": normal(n) * torch.nan},
        segments=torch.stack([labels[i : i + frames] for i in range(m)]) if frames == 3 else None,
        mask=torch.cat([mask, mask]) if n % 2 == 0 else None,
    )
    return residuals, batch


def run(loss, residuals, batch):
    """Loss, log, and gradient with respect to the policy's residual."""
    policy = residuals.policy.clone().requires_grad_()
    reference = residuals.reference if loss.requirements.reference else None
    clean = policy.new_zeros(len(policy)).detach()  # where windows of places do not act
    given = Residuals(policy, reference, sigma=clean)
    value, stats = loss.loss(given, batch, LossContext(1.1))
    return value, stats, torch.autograd.grad(value, policy)[0]


def rows(residuals, batch, index):
    """Some rows, or all in another order."""
    pairs = index[: len(index) // 2]
    return (
        Residuals(residuals.policy[index], residuals.required_reference[index]),
        replace(
            batch,
            latents=batch.latents[index],
            weight=batch.weight[index],
            desirable=batch.desirable[index],
            scores={k: v[index] for k, v in batch.scores.items()},
            segments=None if batch.segments is None else batch.segments[pairs],
            mask=None if batch.mask is None else batch.mask[index],
        ),
    )


def both(pairs, m=4):
    """Rows of these pairs."""
    return tensor([*pairs, *(m + i for i in pairs)])


@every
def test_the_loss_is_a_number_and_the_log_are_numbers_without_gradient(loss):
    value, stats, grad = run(loss, *draw())
    assert value.shape == ()
    assert grad.isfinite().all()
    for name, stat in stats.items():
        assert (stat.shape, stat.requires_grad) == ((), False), name
        assert stat.isfinite(), name
    assert torch.equal(stats["policy_loss"], value.detach())


@every
def test_at_the_start_the_loss_is_what_it_says(loss):
    residuals, batch = draw()
    same = Residuals(residuals.policy, residuals.policy)
    ones = replace(batch, weight=torch.ones_like(batch.weight))
    value, stats, _ = run(loss, same, ones)
    if loss.requirements.at_start is not None:
        assert value.item() == pytest.approx(loss.requirements.at_start)
    if "implicit_accuracy" in stats:
        assert stats["implicit_accuracy"].item() == 0


def test_at_the_start_most_losses_of_references_are_known():
    known = {
        k: v.requirements.at_start for k, v in LOSSES.items() if v.requirements.at_start is not None
    }
    ln2 = 0.6931471805599453
    assert known == {
        "dpo": ln2,
        "dpo_auto": ln2,
        "dpo_smooth": ln2,
        "dpo_hinge": 1.0,
        "dpo_ipo": 0.25,
        "safeguard": ln2,
        "balance": ln2,
        "focus_dpo": ln2,
        "kto": 0.5,
    }


@of_pairs
def test_errors_of_winners_are_lowered_and_those_of_losers_raised(loss):
    """d loss / d l has the sign of d loss / d residual . residual, as l is homogeneous in it."""
    residuals, batch = draw()
    winner, loser = (run(loss, residuals, batch)[2] * residuals.policy).sum((1, 2, 3, 4)).chunk(2)
    assert (winner > 0).all()
    assert (loser <= 0).all()
    assert (loser < 0).any()


@of_rows
def test_errors_of_liked_rows_are_lowered_and_only_disliked_ones_raised(loss):
    residuals, batch = draw(n=7)
    slope = (run(loss, residuals, batch)[2] * residuals.policy).sum((1, 2, 3, 4))
    assert (slope[batch.desirable] > 0).all()
    if loss.requirements.reference:
        assert (slope[~batch.desirable] < 0).all()
    else:
        assert (slope[~batch.desirable] >= 0).all()


@every
def test_the_order_of_pairs_does_not_matter(loss):
    residuals, batch = draw()
    index = both([2, 0, 3, 1])
    value, _, grad = run(loss, residuals, batch)
    other, _, moved = run(loss, *rows(residuals, batch, index))
    assert_close(other, value)
    assert_close(moved, grad[index])


@of_rows
def test_losses_of_rows_take_them_in_any_number_and_order(loss):
    residuals, batch = draw(n=7)
    batch = replace(batch, segments=None)
    index = tensor([6, 2, 0, 5, 3, 1, 4])
    value, _, grad = run(loss, residuals, batch)
    other, _, moved = run(loss, *rows(residuals, batch, index))
    assert_close(other, value)
    assert_close(moved, grad[index])


@every
def test_an_image_is_a_video_of_one_frame(loss):
    residuals, batch = draw(frames=1)
    labels = tensor([[1.0], [1.0], [0.0], [1.0]], dtype=torch.float64)
    batch = replace(batch, segments=labels)
    value, stats, grad = run(loss, residuals, batch)
    flat = Residuals(residuals.policy[:, :, 0], residuals.required_reference[:, :, 0])
    picture = replace(batch, latents=batch.latents[:, :, 0], mask=batch.mask[:, :, 0])
    other, logged, moved = run(loss, flat, picture)
    assert_close(other, value)
    assert_close(moved, grad[:, :, 0])
    assert_close(logged, stats)


@every
def test_errors_are_means_so_that_the_size_of_a_medium_does_not_matter(loss):
    """Everything twice side by side: same loss, half the gradient everywhere."""
    residuals, batch = draw()
    wide = Residuals(
        *(torch.cat([r, r], 4) for r in (residuals.policy, residuals.required_reference))
    )
    mask = torch.cat([batch.mask, batch.mask], 4)
    doubled = replace(batch, latents=torch.cat([batch.latents] * 2, 4), mask=mask)
    value, _, grad = run(loss, residuals, batch)
    other, _, thin = run(loss, wide, doubled)
    assert_close(other, value)
    assert_close(thin, torch.cat([grad, grad], 4) / 2)


@every
def test_weights_multiply_and_what_weighs_nothing_teaches_nothing(loss):
    residuals, batch = draw()
    value, _, grad = run(loss, residuals, batch)
    twice, _, double = run(loss, residuals, replace(batch, weight=2 * batch.weight))
    assert_close(twice, 2 * value)
    assert_close(double, 2 * grad)
    without = batch.weight.clone()
    without[[1, 5]] = 0
    less = run(loss, residuals, replace(batch, weight=without))[2]
    assert less[[1, 5]].abs().max() == 0
    assert_close(less[[0, 2, 3, 4, 6, 7]], grad[[0, 2, 3, 4, 6, 7]])


@every
def test_rows_are_compared_by_losses_that_say_so_and_by_no_other(loss):
    """The gradient of a batch is that of its halves, each counting half, or whole_batch is set."""
    residuals, batch = draw()
    grad = run(loss, residuals, batch)[2]
    halves = torch.zeros_like(grad)
    for index in (both([0, 3]), both([1, 2])):
        halves[index] = run(loss, *rows(residuals, batch, index))[2] / 2
    assert torch.allclose(halves, grad, atol=1e-12) != loss.requirements.whole_batch
