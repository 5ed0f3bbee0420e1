"""The mean score over shifts of a sample: views, gradients, failures and cost."""

import pytest
import torch
from torch.testing import assert_close

from flowalign.types import JudgeCalls, MediaBatch, RewardModel, RewardOutput, RewardSpec
from reward_models.wrappers.composed import Shifted, list_shifts, shift


class Corner(RewardModel):
    """Scores the red value of the upper left pixel; a dark one cannot be scored."""

    def __init__(self, needs=()):
        self.spec = RewardSpec(
            "corner", ("red",), "any", (0.0, 1.0), "MIT", differentiable=True, needs=needs
        )

    def score(self, batch):
        red = batch.media[:, 0, 0, 0, 0]
        failed = {i: "dark" for i, value in enumerate(red.tolist()) if value == 0}
        return RewardOutput.build(self.spec, red[:, None], failed)

    def judge_calls(self, group_sizes):
        return JudgeCalls(sum(group_sizes))


def numbered(height=3, width=4):
    """Return an image in which pixel (row, column) is row + column / 10 + 1."""
    rows = torch.arange(height)[:, None] + torch.arange(width) / 10 + 1
    return rows.expand(1, 1, 3, height, width).clone()


def test_the_nearest_shifts_come_first():
    assert list_shifts(1) == [(0, 0)]
    assert list_shifts(5) == [(0, 0), (-1, 0), (0, -1), (0, 1), (1, 0)]
    assert {max(map(abs, one)) for one in list_shifts(9)} == {0, 1}
    assert len(set(list_shifts(25))) == 25


def test_a_shift_moves_pixels_and_repeats_the_edge():
    image = numbered()
    moved = shift(image, 1, -2)[0, 0, 0]
    assert_close(moved, torch.tensor([[1.2, 1.3, 1.3, 1.3]] * 2 + [[2.2, 2.3, 2.3, 2.3]]))
    assert torch.equal(shift(image, 0, 0), image)


def test_the_score_is_the_mean_of_the_views():
    """The corner shows 1 (three times), 2 (moved up) and 1.1 (moved left)."""
    batch = MediaBatch(numbered(), ["a"])
    model = Shifted(Corner())
    assert model.spec.dims == ("red_shifted",)
    assert float(model.score(batch).values) == pytest.approx((1 + 2 + 1.1 + 1 + 1) / 5)
    farther = Shifted(Corner(), views=5, pixels=2)
    assert float(farther.score(batch).values) == pytest.approx((1 + 3 + 1.2 + 1 + 1) / 5)
    assert float(Shifted(Corner(), views=1).score(batch).values) == 1.0


def test_the_gradient_is_that_of_the_mean():
    media = numbered().requires_grad_()
    Shifted(Corner()).score(MediaBatch(media, ["a"])).values.sum().backward()
    expected = torch.zeros(3, 4)
    expected[0, 0], expected[1, 0], expected[0, 1] = 3 / 5, 1 / 5, 1 / 5
    assert_close(media.grad[0, 0, 0], expected)


def test_a_view_that_cannot_be_scored_fails_its_sample_only():
    media = numbered().repeat(2, 1, 1, 1, 1)
    media[1, :, :, 0, 1] = 0
    output = Shifted(Corner()).score(MediaBatch(media, ["a", "b"]))
    assert output.valid.tolist() == [[True], [False]]
    assert output.reasons == {1: "a view: dark"}


def test_independent_noise_shrinks():
    """Views are (0, 0), up, left and right, which repeats a pixel: weights 2, 1, 1 of 4."""
    media = torch.rand(4000, 1, 3, 3, 3, generator=torch.Generator().manual_seed(0)) + 0.1
    prompts = ["a"] * len(media)
    alone = Corner().score(MediaBatch(media, prompts)).values.var()
    mean = Shifted(Corner(), views=4).score(MediaBatch(media, prompts)).values.var()
    assert float(mean / alone) == pytest.approx((4 + 1 + 1) / 16, rel=0.1)


def test_calls_are_counted_and_comparing_rewards_are_refused():
    assert Shifted(Corner(), views=5).judge_calls([2, 3]).answers == 25
    with pytest.raises(ValueError, match="corner compares samples"):
        Shifted(Corner(needs=("groups",)))
    fingerprints = {Shifted(Corner(), *s).spec.fingerprint() for s in ((5, 1), (5, 2), (9, 1))}
    assert len(fingerprints) == 3
