"""Segments of clips in latent frames and in frames, by hand."""

import pytest
from torch import nan, tensor
from torch.testing import assert_close

from flowalign.extra.clip_pairs.denoiser import (
    compare_with_margin,
    find_frames,
    split_spans,
    temporal_stride,
)


@pytest.mark.parametrize(
    ("num_frames", "length", "expected"),
    [
        (21, 4.0, [(0, 4), (4, 8), (8, 13), (13, 17), (17, 21)]),
        (4, 0.5, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        (3, 50.0, [(0, 3)]),
        (7, 3.0, [(0, 4), (4, 7)]),
    ],
)
def test_spans_are_about_so_long_and_together_everything(num_frames, length, expected):
    assert split_spans(num_frames, length) == expected


@pytest.mark.parametrize(
    ("num_frames", "num_latent", "stride"), [(81, 21, 4), (97, 13, 8), (1, 1, 1), (5, 5, 1)]
)
def test_the_stride_is_that_of_a_causal_vae(num_frames, num_latent, stride):
    assert temporal_stride(num_frames, num_latent) == stride


@pytest.mark.parametrize(("num_frames", "num_latent"), [(80, 21), (5, 1), (3, 5)])
def test_frames_that_no_causal_vae_makes_are_refused_by_their_number(num_frames, num_latent):
    with pytest.raises(ValueError, match=f"{num_frames} frames from {num_latent} latent frames"):
        temporal_stride(num_frames, num_latent)


def test_the_first_latent_frame_is_the_first_frame_and_the_others_stand_for_a_stride_each():
    assert [find_frames(span, 4) for span in ((0, 1), (0, 4), (4, 8), (20, 21))] == [
        (0, 1),
        (0, 13),
        (13, 29),
        (77, 81),
    ]


def test_frames_of_spans_follow_each_other_without_gaps():
    parts = [find_frames(span, 4) for span in split_spans(21, 4.0)]
    assert [stop for _, stop in parts[:-1]] == [start for start, _ in parts[1:]]
    assert (parts[0][0], parts[-1][1]) == (0, 81)


def test_a_difference_up_to_the_margin_is_a_tie_and_an_unknown_score_prefers_nothing():
    a, b = tensor([[0.5, 0.25, 2.0, nan]]), tensor([[0.25, 0.5, 1.875, 1.0]])
    assert_close(compare_with_margin(a, b, 0.25), tensor([[0.0, 0.0, 0.0, 0.0]]))
    assert_close(compare_with_margin(a, b, 0.2), tensor([[1.0, -1.0, 0.0, 0.0]]))
    assert_close(compare_with_margin(a, b, 0.0), tensor([[1.0, -1.0, 1.0, 0.0]]))
