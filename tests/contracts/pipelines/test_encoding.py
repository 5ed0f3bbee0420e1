"""Media become latents and back, one time per row is one row at a time, encoders have names."""

import pytest
import torch

from assets.shapes.world import render
from flowalign.functional.resizing import hole_within, resize_to_cover
from flowalign.types import Reference
from pipelines.parts.encoding import crop_reference
from tests.fixtures.embedded import new_sd3


def test_pictures_of_the_embedded_model_survive_the_round_trip():
    """Measured: root mean square 0.010 of a range of 1, latents near mean 0 and deviation 1."""
    generator = torch.Generator().manual_seed(0)
    prompts = ["a red circle left of a blue square", "two white triangles", "a green circle"]
    media = torch.stack([render(prompt, generator) for prompt in prompts])[:, None]
    policy = new_sd3()
    latents = policy.embed(media)
    assert (policy.decode(latents) - media).square().mean().sqrt() < 0.015
    assert abs(float(latents.mean())) < 0.1
    assert abs(float(latents.std()) - 1) < 0.1


def test_a_wide_picture_is_cut_at_both_sides_and_not_squeezed():
    """12 x 4 into 4 x 4: columns 4 to 7 of a ramp, untouched since the height fits."""
    ramp = (torch.arange(12.0) / 12).expand(1, 3, 4, 12)
    assert torch.equal(resize_to_cover(ramp, 4, 4), ramp[..., 4:8])


def test_a_large_picture_is_averaged_and_a_small_one_enlarged_to_cover():
    stripes = torch.tensor([0.0, 1.0]).repeat(32).expand(2, 3, 96, 64)
    smaller = resize_to_cover(stripes, 16, 16)
    assert smaller.shape == (2, 3, 16, 16)
    torch.testing.assert_close(smaller[..., 2:-2], torch.full((2, 3, 16, 12), 0.5))
    larger = resize_to_cover(stripes[..., :9, :7], 20, 31)
    assert larger.shape == (2, 3, 20, 31)
    assert larger.min() >= 0
    assert larger.max() <= 1


def test_a_film_is_refused_by_a_policy_of_pictures(plain):
    with pytest.raises(ValueError, match="samples have 3 frames"):
        plain.embed(torch.zeros(1, 3, 3, plain.height, plain.width))


def test_the_name_of_the_text_encoder_depends_on_the_length_of_prompts():
    short, long = new_sd3().encoders(), new_sd3(max_sequence_length=2).encoders()
    assert (short[0] == long[0], short[1] == long[1]) == (True, False)


@pytest.mark.slow
def test_the_name_of_the_text_encoder_tells_guided_conditions_apart():
    plain, guided = new_sd3(guidance=1.0).encoders(), new_sd3(guidance=3.0).encoders()
    assert (plain[0] == guided[0], plain[1] == guided[1]) == (True, False)


def test_a_hole_counts_where_the_crop_keeps_it():
    """Of 2 x 4 pixels a square keeps the two columns in the middle."""
    mask = torch.zeros(1, 3, 2, 4)
    mask[..., 0] = 1
    assert not hole_within(mask, 2, 2).any()
    mask[..., 1, 2] = 1
    assert hole_within(mask, 2, 2).tolist() == [[[[False, False], [False, True]]]]
    assert hole_within(mask, 2, 4)[0, 0, :, 0].all()


def test_a_crop_has_a_pixel_at_least():
    thin = Reference("thin", "5 x 1", lambda: torch.rand(1, 3, 5, 1))
    assert crop_reference(thin, 3.0).size == (1, 1)
    assert crop_reference(thin, 0.5).size == (1, 2)
