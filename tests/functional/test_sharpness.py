"""Sharpness by hand, and what blur, noise and contrast do to it."""

import pytest
import torch

from flowalign.functional.degradation import variance_of_laplacian


def grey(rows):
    """A clip of one frame with equal channels, so that its brightness is its values."""
    return torch.tensor(rows)[None, None, None].expand(1, 1, 3, -1, -1).double()


def checked():
    """Images of one bright square each, in different positions and sizes."""
    media = torch.full((2, 1, 3, 16, 16), 0.2, dtype=torch.float64)
    media[0, :, 0, 3:9, 4:11] = 0.9
    media[1, :, 1, 5:8, 2:14] = 0.7
    return media


def blurred(media):
    frames = torch.nn.functional.avg_pool2d(media.flatten(0, 1), 3, stride=1, padding=1)
    return frames.unflatten(0, media.shape[:2])


def test_an_edge_is_worked_out_by_hand():
    """Rows (0, 0, 1, 1): the Laplacian is 0, 1, -1, 0, its mean 0 and its variance 1 / 2."""
    found = variance_of_laplacian(grey([[0.0, 0.0, 1.0, 1.0]] * 3))
    assert found.tolist() == pytest.approx([0.5])


def test_a_point_is_worked_out_by_hand():
    """Of 3 x 3 the middle has -4, its four neighbours 1: the mean is 0, the variance 20 / 9."""
    rows = [[0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    assert variance_of_laplacian(grey(rows)).tolist() == pytest.approx([20 / 9])


def test_channels_count_by_their_brightness():
    media = torch.zeros(3, 1, 3, 3, 3, dtype=torch.float64)
    for channel in range(3):
        media[channel, :, channel, 1, 1] = 1.0
    expected = [20 / 9 * weight**2 for weight in (0.299, 0.587, 0.114)]
    assert variance_of_laplacian(media).tolist() == pytest.approx(expected)


def test_frames_of_a_clip_are_measured_one_by_one():
    """Twice the contrast is four times the variance; a frame between has no share in others."""
    point = grey([[0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    clip = torch.cat([point, 0 * point, 0.5 * point], dim=1)
    assert variance_of_laplacian(clip).tolist() == pytest.approx([20 / 9 * 1.25 / 3])


def test_blur_lowers_it_and_noise_raises_it():
    media, noise = checked(), torch.Generator().manual_seed(3)
    sharp = variance_of_laplacian(media)
    soft = variance_of_laplacian(blurred(media))
    noisy = variance_of_laplacian(
        media + 0.1 * torch.randn(media.shape, generator=noise, dtype=media.dtype)
    )
    assert (soft < 0.5 * sharp).all()
    assert (noisy > 1.5 * sharp).all()


def test_a_picture_of_one_pixel_has_no_edges():
    assert variance_of_laplacian(torch.rand(2, 1, 3, 1, 1)).tolist() == [0.0, 0.0]
