"""Signal and noise of gradients: hand-worked numbers, and the truth of a known distribution."""

import pytest
import torch

from flowalign.functional import signal
from flowalign.functional.signal import (
    Moments,
    Products,
    best_weights,
    cross_fit,
    inner_products,
    leave_one_out,
    moments,
    moments_of_halves,
    project,
    sibling_gain,
    signal_to_noise,
    standard_error,
    subtract_estimation_error,
)


def products_of(gradients: torch.Tensor, blocks: int | None = None) -> Products:
    """Products of batches [b, k, p], batch i in block i modulo their number."""
    blocks = blocks or len(gradients)
    parts = [gradients[start::blocks] for start in range(blocks)]
    return inner_products([list(part.sum(0)) for part in parts], [len(part) for part in parts])


def drawn(count: int, seed: int, means: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Gradients of known means, with noise that steps 0 and 1 share in part."""
    noise = torch.randn(
        count, *means.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    noise[:, 1] = 0.6 * noise[:, 0] + 0.8 * noise[:, 1]
    return means + scales[:, None] * noise


MEANS = torch.tensor([[0.5, 0.0, 0.2], [0.1, 0.3, 0.0], [-0.2, 0.0, 0.1]], dtype=torch.float64)
SCALES = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
NOISE = 3 * torch.tensor([[1.0, 0.3, 0.0], [0.3, 0.25, 0.0], [0.0, 0.0, 4.0]], dtype=torch.float64)
"""Inner products of the noise in three dimensions: 3 s_k s_j times the correlation."""


def test_two_batches_of_two_steps_by_hand():
    """Steps (1, 0), (0, 2) and (3, 0), (1, 0): products between 3, 1, 0, 0, within 5, 1.5, 2.5."""
    gradients = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[3.0, 0.0], [1.0, 0.0]]])
    found = moments(products_of(gradients))
    assert found.signal.tolist() == [[3.0, 0.5], [0.5, 0.0]]
    assert found.noise.tolist() == [[2.0, 1.0], [1.0, 2.5]]
    weights = torch.tensor([1.0, 2.0]).double()
    assert signal_to_noise(found, weights) == pytest.approx(5 / 16)


def test_five_batches_in_two_blocks_by_hand():
    """One step of numbers 1, 2, 3, 4, 5 in blocks 1 + 3 + 5 and 2 + 4.

    signal = 9 * 6 / (3 * 2), noise = (81 + 36 - (9 + 4) * 9) / 5.
    """
    found = moments(products_of(torch.tensor([1.0, 2, 3, 4, 5]).view(5, 1, 1), 2))
    assert found.signal.tolist() == [[9.0]]
    assert found.noise.tolist() == [[0.0]]


def test_products_of_long_gradients_are_taken_in_parts(monkeypatch):
    gradients = drawn(4, 0, MEANS, SCALES)
    whole = products_of(gradients)
    monkeypatch.setattr(signal, "_COLUMNS", 2)
    torch.testing.assert_close(products_of(gradients), whole)
    torch.testing.assert_close(whole.sums, whole.sums.permute(2, 3, 0, 1))


def test_a_scale_multiplies_every_entry_before_the_products():
    gradients, scale = drawn(4, 0, MEANS, SCALES), torch.tensor([2.0, 0.0, -1.0])
    rows = [list(batch) for batch in gradients]
    found = inner_products(rows, [1] * 4, scale)
    torch.testing.assert_close(found, products_of(gradients * scale))


@pytest.mark.parametrize(("batches", "blocks"), [(5, 5), (11, 4)])
def test_estimates_are_unbiased(batches, blocks):
    """The mean over 600 repetitions is within 5 of its standard errors."""
    found = [
        moments(products_of(drawn(batches, seed, MEANS, SCALES), blocks)) for seed in range(600)
    ]
    for estimates, truth in zip(zip(*found, strict=True), (MEANS @ MEANS.T, NOISE), strict=True):
        values = torch.stack(estimates)
        error = values.std(0) / len(values) ** 0.5
        assert ((values.mean(0) - truth).abs() < 5 * error).all()
        assert (error < 0.3).all()


def test_two_halves_of_two_steps_by_hand():
    """Halves (1, 0), (0, 2) and (3, 0), (1, 1) of shares 1/4, 3/4: the whole is (4, 0), (1, 3).

    Products between are 3, 1, 0, 2, and 16 / 3 times as much for the whole.
    """
    gradients = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[3.0, 0.0], [1.0, 1.0]]])
    found = moments_of_halves(gradients, (0.25, 0.75))
    torch.testing.assert_close(found.signal, torch.tensor([[16, 8 / 3], [8 / 3, 32 / 3]]).double())
    whole = torch.tensor([[16.0, 4.0], [4.0, 10.0]]).double()
    torch.testing.assert_close(found.noise, whole - found.signal)


def test_estimates_from_halves_are_unbiased():
    """Of 3 prompts, one half has 1; the mean of 4,000 is within 5 of its standard errors."""
    found = []
    for seed in range(4000):
        prompts = drawn(3, seed, MEANS, SCALES) / 3
        found.append(
            moments_of_halves(torch.stack([prompts[0], prompts[1:].sum(0)]), (1 / 3, 2 / 3))
        )
    for estimates, truth in zip(
        zip(*found, strict=True), (MEANS @ MEANS.T, NOISE / 3), strict=True
    ):
        values = torch.stack(estimates)
        error = values.std(0) / len(values) ** 0.5
        assert ((values.mean(0) - truth).abs() < 5 * error).all()
        assert (error < 0.1).all()


def test_projections_keep_inner_products_on_average():
    """Of 200 projections of 10 entries to 4 sums, the mean is within 5 of its standard errors."""
    a, b = torch.arange(10.0), torch.arange(10.0).flip(0) ** 2 / 9
    generator = torch.Generator().manual_seed(0)
    signs = [torch.randint(2, (10,), generator=generator).bool() for _ in range(200)]
    values = torch.stack([project(a, one, 4) @ project(b, one, 4) for one in signs])
    assert project(a, signs[0], 4).shape == (4,)
    assert (values.mean() - a @ b).abs() < 5 * values.std() / 200**0.5
    assert values.std() > 1


def test_a_projection_by_hand():
    """Entries 1 and 5 are one sum, 2 and 6 another; the third and the sixth are negated."""
    signs = torch.tensor([True, True, False, True, True, False])
    assert project(torch.arange(1.0, 7.0), signs, 4).tolist() == [6.0, -4.0, -3.0, 4.0]


@pytest.mark.slow
def test_intervals_cover_the_truth():
    """Of 300 intervals of two standard errors, about 95 % hold the signal of each step."""
    truth, covered = MEANS @ MEANS.T, torch.zeros(3)
    for seed in range(300):
        products = products_of(drawn(32, seed, MEANS, SCALES), 16)
        left = leave_one_out(lambda kept, p=products: moments(p, kept).signal.diagonal(), 16)
        found = moments(products).signal.diagonal()
        covered += (found - truth.diagonal()).abs() < 2 * standard_error(left)
    assert (covered / 300 > 0.88).all()
    assert (covered / 300 < 0.99).all()


def test_the_best_weights_are_better_than_all_others():
    """By the measure that they maximise: the projection on the whole mean gradient."""
    found = Moments(MEANS @ MEANS.T, NOISE)
    best, total = best_weights(found), found.signal.sum(1)

    def shown(w: torch.Tensor) -> torch.Tensor:
        return (w @ total).square() / (w @ found.noise @ w)

    assert best.max() == 1
    assert (best >= 0).all()
    others = torch.rand(2000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert all(shown(best) >= shown(w) for w in others)
    assert signal_to_noise(found, best) > 1.5 * signal_to_noise(found, torch.ones(3).double())


def test_a_step_that_leads_elsewhere_has_no_weight():
    means = torch.tensor([[2.0, 0.0], [1.0, 0.5], [-1.0, 0.1]])
    weights = best_weights(Moments(means @ means.T, torch.diag(torch.tensor([1.0, 2.0, 3.0]))))
    assert weights[2] == 0
    assert weights[0] == 1
    assert 0 < weights[1] < 1


def test_signal_that_does_not_stand_out_is_taken_away():
    """In units of noises 1 and 4 the estimate is [[2, 1], [1, 0]]: eigenvalues 1 +- sqrt 2.

    The lower one taken from the upper leaves 2, along (1, sqrt 2 - 1) / sqrt(4 - 2 sqrt 2).
    """
    found = subtract_estimation_error(
        Moments(
            torch.tensor([[2.0, 2.0], [2.0, 0.0]]).double(),
            torch.diag(torch.tensor([1.0, 4.0])).double(),
        )
    )
    root = 2**0.5
    along = torch.tensor([1, 2 * (root - 1)]).double()
    wanted = 2 / (4 - 2 * root) * along[:, None] * along
    torch.testing.assert_close(found.signal, wanted)
    assert found.noise.diagonal().tolist() == [1, 4]


def test_signals_known_exactly_stand_out_whole_and_their_negative_not_at_all():
    exact = Moments(MEANS @ MEANS.T, NOISE)
    torch.testing.assert_close(
        subtract_estimation_error(exact).signal, exact.signal, atol=1e-12, rtol=0
    )
    negative = subtract_estimation_error(Moments(-exact.signal, NOISE))
    torch.testing.assert_close(negative.signal, 0 * exact.signal, atol=1e-12, rtol=0)


def test_a_signal_that_no_step_has_gives_no_weights():
    found = Moments(-torch.eye(2), torch.eye(2))
    assert best_weights(found).tolist() == [0, 0]


def test_gradients_of_zero_have_no_signal_to_noise():
    nothing = products_of(torch.zeros(8, 2, 3))
    assert signal_to_noise(moments(nothing), torch.ones(2).double()) == 0
    assert cross_fit(nothing) == 0


def test_weights_are_judged_by_batches_that_did_not_choose_them():
    """Without any signal, weights judged by their own batches seem to show one, and here do not."""
    nothing, steps = torch.zeros(6, 40, dtype=torch.float64), torch.ones(6).double()
    products = [products_of(drawn(12, seed, nothing, steps)) for seed in range(100)]
    own = torch.stack([signal_to_noise(m, best_weights(m)) for m in map(moments, products)])
    judged = torch.stack([cross_fit(one) for one in products])
    assert own.mean() > 0.01
    assert judged.mean().abs() < 4 * judged.std() / len(judged) ** 0.5


def test_weights_found_elsewhere_are_judged_here():
    """Where the signal has moved to another step, earlier weights miss what new ones find."""
    early = torch.tensor([[3.0, 0.0], [0.0, 0.0]])
    ones = torch.ones(2)
    before, after = (products_of(drawn(12, 0, means, ones)) for means in (early, early.flip(0)))
    assert cross_fit(after, chosen_by=before) < 0.2 * cross_fit(after)
    assert cross_fit(before, chosen_by=before) == cross_fit(before)


def test_blocks_keep_their_half_when_others_are_left_out():
    """Without block 0, the odd blocks still choose for the even ones."""
    products = products_of(drawn(8, 3, 5 * MEANS, SCALES))
    kept = torch.arange(8) != 0
    odd = torch.arange(8) % 2 == 1
    halves = moments(products, odd), moments(products, kept & ~odd)
    judged = [signal_to_noise(halves[1 - i], best_weights(half)) for i, half in enumerate(halves)]
    assert cross_fit(products, kept) == pytest.approx(float(sum(judged) / 2))


def test_the_error_of_a_mean_is_the_textbook_one():
    values = torch.tensor([1.0, 2.0, 4.0, 8.0])
    left = leave_one_out(lambda kept: values[kept].mean(), 4)
    assert float(standard_error(left)) == pytest.approx(float(values.std() / 2))


@pytest.mark.parametrize(("count", "work"), [(1, moments), (3, cross_fit)])
def test_too_few_blocks_are_refused(count, work):
    with pytest.raises(ValueError, match="there are 1 blocks of gradients"):
        work(Products(torch.zeros(count, 2, count, 2), torch.ones(count, dtype=torch.long)))


def test_the_gain_of_siblings_by_hand():
    """Step 0: 1.1 x 2.5 / (0.2 x 2 x 2.5). Step 1: (1.2 + s^2) x 2.5 / ((0.4 + s^2) x 2 x 1.5)."""
    own, more = torch.tensor([0.1, 0.2]), {"ahead": torch.tensor([1.0, 0.0]), "num_steps": 3}
    found = sibling_gain(own, 1.0, 0.0, children=2, training=1.0, **more)
    torch.testing.assert_close(found, torch.tensor([2.75, 2.5]))
    noisy = sibling_gain(own, 1.0, 3.0, children=2, training=1.0, **more)
    torch.testing.assert_close(noisy[1], torch.tensor(4.2 * 2.5 / (3.4 * 3)))
