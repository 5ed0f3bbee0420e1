"""The network sees the given first frame, and the state arrives at it; checked by hand."""

import torch

from pipelines.families.first_frame import insert_first_frame, lead_to_first_frame, mask_first_times

X = torch.arange(12.0).view(1, 2, 3, 2, 1) / 10
FIRST = torch.tensor([[[[[0.5], [-0.5]]], [[[0.25], [0.75]]]]])


def test_the_network_sees_the_given_frame_and_then_the_state():
    seen = insert_first_frame(X, FIRST)
    assert torch.equal(seen[:, :, :1], FIRST)
    assert torch.equal(seen[:, :, 1:], X[:, :, 1:])


def test_the_velocity_of_the_first_frame_is_its_way_divided_by_sigma():
    """At .4, from 0 to .5 and from .1 to -.5: -1.25 and 1.5."""
    v = torch.ones_like(X)
    found = lead_to_first_frame(v, X, torch.tensor(0.4), FIRST)
    torch.testing.assert_close(found[0, 0, 0, :, 0], torch.tensor([-1.25, 1.5]))
    assert torch.equal(found[:, :, 1:], v[:, :, 1:])


def test_steps_of_any_length_end_at_the_given_frame():
    x = X
    for sigma, after in ((1.0, 0.7), (0.7, 0.1), (0.1, 0.0)):
        x = x + (after - sigma) * lead_to_first_frame(-X, x, torch.tensor(sigma), FIRST)
    torch.testing.assert_close(x[:, :, :1], FIRST)
    torch.testing.assert_close(x[:, :, 1:], 2 * X[:, :, 1:])


def test_a_clip_that_begins_with_the_frame_has_no_residual_there():
    """noise - data is the target of matching losses; data begins with the given frame."""
    noise, sigma = X.flip(3), torch.tensor([0.3])
    data = insert_first_frame(X, FIRST)
    x = (1 - sigma) * data + sigma * noise
    residual = lead_to_first_frame(torch.zeros_like(x), x, sigma, FIRST) - (noise - data)
    torch.testing.assert_close(residual[:, :, :1], torch.zeros_like(FIRST), atol=1e-6, rtol=0)


def test_tokens_of_the_first_frame_have_time_0():
    """Three frames of two tokens, from one time per row, or from one per token."""
    times = mask_first_times(torch.tensor([700.0, 300.0]), 6, 3)
    assert times.tolist() == [[0, 0, *[700] * 4], [0, 0, *[300] * 4]]
    each = torch.tensor([[700.0], [300.0]]).expand(2, 6)
    assert torch.equal(mask_first_times(each, 6, 3), times)
    assert each.tolist() == [[700] * 6, [300] * 6]
