"""What LTX-2 is guided away from, and the rescaling of its clean estimate, by hand."""

import pytest
import torch

from pipelines.families.ltx2_guidance import Parts, Streams, audio_shape, audio_tokens, guide

X, V, OTHER = (torch.tensor([row]) for row in ([1.0, 2, 4], [1.0, 0, 2], [0.0, 1, 3]))
HALF = torch.tensor([0.5])


def test_without_rescaling_differences_are_added_with_their_weights():
    """v - other is (1, -1, -1)."""
    found = guide(X, HALF, V, [(2.0, OTHER), (0.5, 0 * V)], 0.0)
    assert found.tolist() == [[1 + 2 + 0.5, 0 - 2 + 0, 2 - 2 + 1]]
    assert guide(X, HALF, V, [], 0.7).tolist() == V.tolist()


def test_the_clean_estimate_gets_its_deviation_back_in_part():
    """The sum is (3, -2, 0): x0 is (-.5, 3, 4) and that of v (.5, 2, 3).

    Squares of differences from the means 13/6 and 11/6 add up to 67/6 and 19/6; f at .8 is
    .8 sqrt(19/67) + .2.
    """
    found = guide(X, HALF, V, [(2.0, OTHER)], 0.8)
    factor = 0.8 * (19 / 67) ** 0.5 + 0.2
    clean = factor * torch.tensor([[-0.5, 3, 4]])
    torch.testing.assert_close(X - 0.5 * found, clean)


def test_each_sample_is_rescaled_by_itself():
    x, v, other = (torch.cat([one, 3 * one.flip(1)]) for one in (X, V, OTHER))
    sigma = torch.tensor([0.5, 0.2])
    both = guide(x, sigma, v, [(2.0, other)], 0.8)
    alone = guide(x[1:], sigma[1:], v[1:], [(2.0, other[1:])], 0.8)
    torch.testing.assert_close(both[1:], alone)


@pytest.mark.parametrize(
    ("guidance", "streams", "wanted"),
    [
        (3.0, Streams(), {"negative": (2, 6), "perturbed": (1, 1), "isolated": (2, 2)}),
        (3.0, Streams(audio_guidance=None, perturbed=0.0, modality=1.0), {"negative": (2, 2)}),
        (1.0, Streams(audio_guidance=7.0, perturbed=0.0, modality=1.0), {"negative": (0, 6)}),
        (1.0, Streams(audio_guidance=None, perturbed=0.5, modality=1.0), {"perturbed": (0.5, 0.5)}),
        (1.0, Streams(audio_guidance=1.0, perturbed=0.0, modality=0.5), {}),
    ],
)
def test_only_guidances_in_use_are_evaluated(guidance, streams, wanted):
    assert streams.weights(guidance) == wanted


def test_audio_has_25_latents_a_second_of_the_released_autoencoder():
    """16000 / 160 / 4; 121 frames at 24 a second are 5.04 s; 64 frequencies are 16."""
    released = {"sample_rate": 16000, "mel_hop_length": 160, "latent_channels": 8, "mel_bins": 64}
    assert audio_shape(released, 121 / 24) == (8, 126, 16)


def test_tokens_of_audio_are_one_for_each_time_and_go_back():
    """Channels are slower than frequencies within a token."""
    parts = Parts((1, 1, 1, 1), (2, 3, 2))
    audio = torch.arange(12.0).view(1, 2, 3, 2)
    tokens = audio_tokens(audio)
    assert tokens[0].tolist() == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    assert torch.equal(parts.audio_of(tokens), audio)
    assert parts.size == 13
