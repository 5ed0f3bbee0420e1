"""Ridge regression from running sums, against arithmetic by hand and least squares."""

import json

import torch
from torch.testing import assert_close

from flowalign.functional.rating import Regression


def drawn(count, features=3, targets=2, seed=0):
    """Features of different sizes, and targets that they explain in part."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, features, dtype=torch.float64, generator=generator)
    x = x * torch.tensor([1.0, 10.0, 0.01][:features])
    y = x @ torch.randn(features, targets, dtype=torch.float64, generator=generator)
    return x, y + torch.randn(count, targets, dtype=torch.float64, generator=generator)


def test_weights_by_hand():
    """x = 1, 2, 2 and y = 3, 3, 6: sum xx = 9, sum xy = 21; one feature, three samples."""
    seen = Regression.start(1, 1).update(
        torch.tensor([[1.0], [2.0], [2.0]]), torch.tensor([[3.0], [3.0], [6.0]])
    )
    assert_close(seen.weights(6.0).item(), 21 / (9 * (1 + 6 / 3)))


def test_a_small_penalty_is_least_squares():
    x, y = drawn(50)
    got = Regression.start(3, 2).update(x, y).weights(1e-12)
    assert_close(got, torch.linalg.lstsq(x, y).solution)


def test_units_of_features_do_not_matter():
    x, y = drawn(40)
    units = torch.tensor([3.0, 1e-6, 1e4], dtype=torch.float64)
    plain = Regression.start(3, 2).update(x, y).weights(2.0)
    assert_close(Regression.start(3, 2).update(x * units, y).weights(2.0) * units[:, None], plain)


def test_the_penalty_is_the_share_of_noise_where_features_are_alike():
    """On held-out samples, other powers of ten are worse than unexplained over explained."""
    generator = torch.Generator().manual_seed(1)
    count, features, unexplained = 400, 50, 4.0

    def some(n):
        x = torch.randn(n, features, dtype=torch.float64, generator=generator)
        noise = torch.randn(n, 1, dtype=torch.float64, generator=generator)
        return x, x @ truth + unexplained**0.5 * noise

    truth = torch.randn(features, 1, dtype=torch.float64, generator=generator) / features**0.5
    seen, (x, y) = Regression.start(features, 1).update(*some(count)), some(20_000)
    penalties = (0.04, 0.4, 4.0, 40.0, 400.0)
    error = {p: float((x @ seen.weights(p) - y).square().mean()) for p in penalties}
    assert min(error, key=lambda p: error[p]) == unexplained


def test_batches_add_up_to_all_samples_at_once():
    x, y = torch.randint(-3, 4, (2, 12, 3)).double()
    whole = Regression.start(3, 3).update(x, y)
    parts = Regression.start(3, 3).update(x[:5], y[:5]).update(x[5:], y[5:])
    assert torch.equal(parts.gram, whole.gram)
    assert torch.equal(parts.cross, whole.cross)
    assert parts.count == whole.count == 12


def test_older_batches_count_less():
    x, y = torch.ones(2, 1), torch.ones(2, 1)
    seen = Regression.start(1, 1).update(x, y).update(x, -y, memory=0.5)
    assert (seen.gram.item(), seen.cross.item(), seen.count) == (3.0, -1.0, 3.0)


def test_features_that_never_varied_and_an_empty_past_give_weights_of_zero():
    assert Regression.start(2, 3).weights(1.0).tolist() == [[0.0] * 3] * 2
    x, y = torch.tensor([[0.0, 1.0], [0.0, -1.0]]), torch.tensor([[2.0], [-2.0]])
    weights = Regression.start(2, 1).update(x, y).weights(1.0)
    assert weights[0] == 0
    assert_close(weights[1].item(), 1.0)


def test_the_state_of_a_checkpoint_is_exact():
    seen = Regression.start(3, 2).update(*drawn(7)).update(*drawn(5, seed=3), memory=1 / 3)
    again = Regression.restore(json.loads(json.dumps(seen.state())))
    assert torch.equal(again.gram, seen.gram)
    assert torch.equal(again.cross, seen.cross)
    assert again.count == seen.count
