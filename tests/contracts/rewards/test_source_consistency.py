"""Source consistency of edits, by hand and by the contract of every reward."""

from dataclasses import replace

import pytest
import torch

from flowalign.types import MediaBatch
from reward_models.signals.source_consistency import (
    SourceConsistency,
    UnchangedPixels,
    compare_pixels,
)
from tests.fixtures.rated import Seeing
from tests.fixtures.reward_contract import check_contract, example_batch


def corners() -> Seeing:
    """Encoder with six numbers per image, far from its border; three may be negative."""
    return Seeing(lambda x: torch.cat([x[:, :, 1, 1], x[:, :, -2, -2] - 0.5], 1))


def edits(num=4):
    batch = example_batch(num)
    sources = example_batch(num, height=50, width=40, seed=3).media
    return replace(batch, references=[[source[0]] for source in sources])


def test_kept_is_the_mean_difference_outside_the_mask():
    """By hand, of four pixels that differ by .1, .2, .3 and .8; the mask hides half of the last."""
    source = torch.full((3, 2, 2), 0.1)
    edit = source + torch.tensor([[0.1, 0.2], [0.3, 0.8]])
    assert compare_pixels(edit, source).item() == pytest.approx(1 - 1.4 / 4)
    mask = torch.tensor([[[0.0, 0.0], [0.0, 0.5]]])
    assert compare_pixels(edit, source, mask).item() == pytest.approx(1 - (0.6 + 0.4) / 3.5)
    assert compare_pixels(edit, source, torch.ones(1, 2, 2)).isnan()


@pytest.mark.parametrize("reward", [UnchangedPixels(), SourceConsistency(corners())])
def test_what_every_reward_promises(reward):
    check_contract(reward, edits())


@pytest.mark.parametrize("reward", [UnchangedPixels(), SourceConsistency(corners())])
def test_every_edit_is_compared_with_its_own_source(reward):
    """An unchanged image scores 1, also if its source had another size."""
    grey = [torch.full((3, 8 + i, 9), (i + 1) / 6) for i in range(4)]
    media = torch.stack([torch.full((1, 3, 8, 9), (i + 1) / 6) for i in range(4)])
    batch = MediaBatch(media, [""] * 4, references=[[g, grey[0]] for g in grey])
    torch.testing.assert_close(reward.score(batch).values, torch.ones(4, 1))
    mixed = reward.score(replace(batch, references=batch.references[::-1])).values
    assert (mixed < 0.99).all()


def test_only_samples_with_a_mask_are_forgiven_what_it_hides():
    source = torch.zeros(3, 8, 8)
    edit = source.clone()
    edit[:, :4] = 1.0
    hole = torch.zeros(1, 8, 8)
    hole[:, :4] = 1.0
    batch = MediaBatch(
        edit.expand(4, 1, 3, 8, 8),
        [""] * 4,
        references=[[source]] * 4,
        masks=[hole, None, 1 - hole, torch.ones(1, 8, 8)],
    )
    output = UnchangedPixels().score(batch)
    assert output.values[:3, 0].tolist() == [1.0, 0.5, 0.0]
    assert output.reasons == {3: "its mask covers the whole image"}


def test_a_mask_of_another_size_is_resized_with_the_source():
    edit = torch.zeros(1, 1, 3, 8, 8)
    edit[..., :4, :] = 1.0
    hole = torch.zeros(1, 4, 4)
    hole[:, :2] = 1.0
    batch = MediaBatch(edit, [""], references=[[torch.zeros(3, 16, 4)]], masks=[hole])
    score = UnchangedPixels().score(batch).values.item()
    assert 0.8 < score < 1.0  # the mask's border is soft
    assert UnchangedPixels().score(replace(batch, masks=())).values.item() == pytest.approx(0.5)


def test_features_that_point_away_score_zero():
    media, source = torch.zeros(1, 1, 3, 4, 4), torch.zeros(3, 4, 4)
    source[:, -2, -2] = 1.0
    batch = MediaBatch(media, [""], references=[[source]])
    assert SourceConsistency(corners()).score(batch).values.item() == 0.0
