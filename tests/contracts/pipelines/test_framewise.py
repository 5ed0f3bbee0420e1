"""Windows of latent frames: which they are, how they fade into each other, and their bound."""

import pytest
import torch

from pipelines.parts.encoding import decode_windows


def seen_frames(z):
    """Each of 1 + 2 (f - 1) frames is the latent frame that it stands for; see `lines`."""
    first, others = z[:, :, :1], z[:, :, 1:]
    return torch.cat([first, others.repeat_interleave(2, dim=2)], dim=2)


def lines(z):
    """Four frames for each latent frame but the first, on straight lines between them."""
    steps = torch.arange(1, 5) / 4
    between = (
        z[:, :, :-1, None] + steps[:, None, None] * (z[:, :, 1:] - z[:, :, :-1])[:, :, :, None]
    )
    return torch.cat([z[:, :, :1], between.flatten(2, 3)], dim=2)


def latents(frames, count=2):
    shape = count, 3, frames, 2, 1
    return torch.randn(shape, generator=torch.Generator().manual_seed(frames))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("frames", [1, 2, 3, 6, 7, 11])
def test_a_decoder_that_looks_no_further_than_one_frame_back_decodes_as_at_once(frames, size):
    held, z = [], latents(frames)

    def decode(window):
        held.append(window.shape[2])
        return lines(window)

    made = torch.cat(list(decode_windows(decode, z, size, 4)), dim=2)
    torch.testing.assert_close(made, lines(z), atol=1e-6, rtol=0)
    assert max(held) == min(size + 1, frames)


def test_latents_that_fit_one_window_are_decoded_once():
    pieces = list(decode_windows(lines, latents(5), 4, 4))
    assert len(pieces) == 1
    assert torch.equal(pieces[0], lines(latents(5)))


def test_windows_fade_into_each_other_by_hand():
    """9 latent frames 0..8 of 2 frames each, windows of 5, 4 of them new, overlapping by 1.

    A decoder that adds 100 to the frames of its second window, and 200 to those of its third:
    windows begin at 0, 3 and 6, so the overlaps are the frames of latent 4 and of latent 7, and
    the first frame of an overlap is still the earlier window's, the second half of each.
    """
    z, calls = torch.arange(9.0).view(1, 1, 9, 1, 1), []

    def decode(window):
        calls.append(window.flatten().tolist())
        return seen_frames(window) + 100 * (len(calls) - 1)

    pieces = [piece.flatten().tolist() for piece in decode_windows(decode, z, 4, 2)]
    assert calls == [[0, 1, 2, 3, 4], [3, 4, 5, 6, 7], [6, 7, 8]]
    assert pieces == [
        [0, 1, 1, 2, 2, 3, 3],
        [4, 54, 105, 105, 106, 106],
        [107, 157, 208, 208],
    ]


def test_pieces_are_made_one_after_the_other():
    """Nothing of a later window is computed before an earlier one has been taken."""
    calls = []

    def decode(window):
        calls.append(window.shape[2])
        return lines(window)

    pieces = decode_windows(decode, latents(11), 2, 4)
    assert calls == []
    next(pieces)
    assert len(calls) == 1
