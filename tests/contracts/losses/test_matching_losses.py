"""Properties that every matching loss must satisfy."""

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from flowalign.extra import KVPO, FocusDPO
from flowalign.types import Batch, LossContext
from flowalign.types.losses import FIELDS
from tests.fixtures.matching_losses import LOSSES

every = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)

PAIRED = {k: v for k, v in LOSSES.items() if v.paired}
of_pairs = pytest.mark.parametrize("loss", PAIRED.values(), ids=PAIRED)
ROWS = {k: v for k, v in LOSSES.items() if not v.paired}
LABELLED = {k: v for k, v in ROWS.items() if "advantage" not in v.needs}
of_labels = pytest.mark.parametrize("loss", LABELLED.values(), ids=LABELLED)
of_rows = pytest.mark.parametrize("loss", ROWS.values(), ids=ROWS)
SPATIAL = "latents", "policy", "reference", "old", "anchor", "target", "region"


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
    labels = tensor([1.0, 0.0, 1.0] * 4, dtype=torch.float64)
    columns = {
        "policy": 0.8 * reference + 0.3 * normal(*shape),
        "reference": reference,
        "sigma": 0.3 + 0.6 * (torch.arange(n, dtype=torch.float64) // 4),
        "desirable": torch.arange(n) < m,
    }
    mask = normal(m, *shape[1:]).abs()
    columns["latents"] = normal(*shape)
    columns["weight"] = (normal(m).abs() + 0.5).repeat(2) if n % 2 == 0 else normal(n).abs() + 0.5
    columns["scores"] = {"text": normal(n), "unused": normal(n) * torch.nan}
    columns["advantage"] = normal(n)
    columns["group"] = torch.arange(n) // 4
    for name, size in (("old", 0.2), ("anchor", 0.1)):
        columns[name] = columns["policy"] + size * normal(*shape)
    columns["target"] = normal(*shape)
    if n % 2 == 0:
        columns["pair"] = torch.arange(m).repeat(2)
        columns["region"] = torch.cat([mask, mask])
        columns["region_strength"] = torch.ones(n)
        rows = torch.stack([labels[i : i + frames] for i in range(m)])
        columns["segments"] = torch.cat([rows, -rows])
    return Batch(columns)


def run(loss, batch):
    """Loss, log, and gradient with respect to the policy's residual, of only what is needed."""
    policy = batch["policy"].clone().requires_grad_()
    if isinstance(loss, FocusDPO):  # its windows of places do not act there
        batch = batch.with_columns(sigma=torch.zeros_like(batch["sigma"]))
    given = batch.without(*(name for name in FIELDS if name not in loss.needs))
    value, stats = loss.loss(given.with_columns(policy=policy), LossContext(1.1))
    return value, stats, torch.autograd.grad(value, policy)[0]


def both(pairs, m=4):
    """Rows of these pairs."""
    return tensor([*pairs, *(m + i for i in pairs)])


@every
def test_the_loss_is_a_number_and_the_log_are_numbers_without_gradient(loss):
    value, stats, grad = run(loss, draw())
    assert value.shape == ()
    assert grad.isfinite().all()
    for name, stat in stats.items():
        assert (stat.shape, stat.requires_grad) == ((), False), name
        assert stat.isfinite(), name
    assert torch.equal(stats["policy_loss"], value.detach())


@every
def test_at_the_start_the_loss_is_what_it_says(loss):
    batch = draw()
    ones = torch.ones_like(batch["weight"])
    same = dict.fromkeys(FIELDS, batch["policy"])
    value, stats, _ = run(loss, batch.with_columns(weight=ones, **same))
    if loss.at_start is not None:
        assert value.item() == pytest.approx(loss.at_start)
    if "implicit_accuracy" in stats:
        assert stats["implicit_accuracy"].item() == 0


def test_at_the_start_most_losses_of_references_are_known():
    known = {k: v.at_start for k, v in LOSSES.items() if v.at_start is not None}
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
        "dgpo": ln2,
        "dgpo_old": ln2,
    }


@of_pairs
def test_errors_of_winners_are_lowered_and_those_of_losers_raised(loss):
    """d loss / d l has the sign of d loss / d residual . residual, as l is homogeneous in it."""
    batch = draw()
    winner, loser = (run(loss, batch)[2] * batch["policy"]).sum((1, 2, 3, 4)).chunk(2)
    assert (winner > 0).all()
    assert (loser <= 0).all()
    assert (loser < 0).any()


@of_labels
def test_errors_of_liked_rows_are_lowered_and_only_disliked_ones_raised(loss):
    batch = draw(n=7)
    slope = (run(loss, batch)[2] * batch["policy"]).sum((1, 2, 3, 4))
    assert (slope[batch["desirable"]] > 0).all()
    if "reference" in loss.needs:
        assert (slope[~batch["desirable"]] < 0).all()
    else:
        assert (slope[~batch["desirable"]] >= 0).all()


@every
def test_the_order_of_pairs_does_not_matter(loss):
    batch = draw()
    index = both([2, 0, 3, 1])
    value, _, grad = run(loss, batch)
    other, _, moved = run(loss, batch.take(index))
    assert_close(other, value)
    assert_close(moved, grad[index])


@of_rows
def test_losses_of_rows_take_them_in_any_number_and_order(loss):
    batch = draw(n=7)
    index = tensor([6, 2, 0, 5, 3, 1, 4])
    value, _, grad = run(loss, batch)
    other, _, moved = run(loss, batch.take(index))
    assert_close(other, value)
    assert_close(moved, grad[index])


@every
def test_an_image_is_a_video_of_one_frame(loss):
    batch = draw(frames=1)
    labels = tensor([[1.0], [1.0], [0.0], [1.0]], dtype=torch.float64)
    batch = batch.with_columns(segments=torch.cat([labels, -labels]))
    value, stats, grad = run(loss, batch)
    flat = {name: batch[name][:, :, 0] for name in SPATIAL}
    other, logged, moved = run(loss, batch.with_columns(**flat))
    assert_close(other, value)
    assert_close(moved, grad[:, :, 0])
    assert_close(logged, stats)


@every
def test_errors_are_means_so_that_the_size_of_a_medium_does_not_matter(loss):
    """Everything twice side by side: same loss, half the gradient everywhere."""
    batch = draw()
    wide = {name: torch.cat([batch[name]] * 2, 4) for name in SPATIAL}
    value, _, grad = run(loss, batch)
    other, _, thin = run(loss, batch.with_columns(**wide))
    assert_close(other, value)
    assert_close(thin, torch.cat([grad, grad], 4) / 2)


@every
def test_weights_multiply_and_what_weighs_nothing_teaches_nothing(loss):
    batch = draw()
    value, _, grad = run(loss, batch)
    twice, _, double = run(loss, batch.with_columns(weight=2 * batch["weight"]))
    assert_close(twice, 2 * value)
    assert_close(double, 2 * grad)
    if isinstance(loss, KVPO):  # the softmax of a group teaches all of its rows
        return
    without = batch["weight"].clone()
    without[[1, 5]] = 0
    less = run(loss, batch.with_columns(weight=without))[2]
    assert less[[1, 5]].abs().max() == 0
    assert_close(less[[0, 2, 3, 4, 6, 7]], grad[[0, 2, 3, 4, 6, 7]])


@every
def test_rows_are_compared_by_losses_that_say_so_and_by_no_other(loss):
    """The gradient of a batch is that of its halves, each counting half, or the loss says so."""
    batch = draw()
    grad = run(loss, batch)[2]
    halves = torch.zeros_like(grad)
    for index in (both([0, 3]), both([1, 2])):
        halves[index] = run(loss, batch.take(index))[2] / 2
    compares = loss.whole_batch or "group" in loss.needs
    assert torch.allclose(halves, grad, atol=1e-12) != compares
