"""Properties of FLUX.1 Fill: the network sees the mask and the image around it."""

from dataclasses import replace

import pytest
import torch

from flowalign.types import Request
from pipelines.families.flux1 import Flux1, Flux1Fill
from tests.fixtures.families import noise, official_fill
from tests.fixtures.pictures import HOLES, mask, picture
from tests.fixtures.policy_contract import PictureContract
from tests.fixtures.tiny_families import family_fixture, sizes
from tests.fixtures.tiny_flux import build_flux

pytestmark = pytest.mark.slow


family = family_fixture(
    "flux1_fill",
    Flux1Fill,
    official_fill,
    {"num_attention_heads": 3},
    cases=sizes("embedded_guidance", (48, 64, 30.0), (32, 80, 30.0)),
)


class TestFlux1Fill(PictureContract):
    pass


def test_what_is_under_the_mask_does_not_matter_and_what_surrounds_it_does(plain):
    painted = HOLES[0].references[0].read()
    inside, outside = painted.clone(), painted.clone()
    inside[..., 10:20, 30:40] = 0.5
    outside[..., 40:, :] = 0.5
    changed = [
        replace(HOLES[0], references=(replace(picture(9), read=one.clone),))
        for one in (inside, outside)
    ]
    cond = plain.encode([HOLES[0], *changed])["source"]
    assert torch.equal(cond[1], cond[0])
    assert (cond[2] - cond[0]).abs().max() > 1e-2


def test_the_mask_changes_the_velocity(plain):
    x, sigma = noise(plain, 1), torch.tensor(0.6)
    cond = plain.encode(HOLES[:1])
    other = dict(cond, source=cond["source"].clone())
    other["source"][:, 16:] = 1 - other["source"][:, 16:]  # the 64 channels behind the picture's
    with torch.no_grad():
        difference = plain.velocity(x, sigma, other) - plain.velocity(x, sigma, cond)
    assert difference.abs().max() > 1e-3


def test_a_request_is_encoded_alike_every_time(plain):
    """The pipeline would draw its latents."""
    first, second = plain.encode(HOLES), plain.encode(HOLES)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "takes a mask, and the request has none"),
        (mask(32, 64), "is 64x32, but its image is 64x48"),
        (mask(hole=(8, 8)), "is black within its 64x48"),
    ],
    ids=["no mask", "another size", "no hole"],
)
def test_a_mask_that_cannot_be_painted_is_refused(plain, given, said):
    with pytest.raises(ValueError, match=said):
        plain.encode([replace(HOLES[0], mask=given)])


def test_a_hole_that_the_crop_cuts_off_is_refused(plain):
    """Of 144 rows the middle 48 are kept."""
    tall = Request("a", (picture(1, 144, 64),), mask(144, 64, hole=(0, 40)))
    with pytest.raises(ValueError, match="is black within its 64x48"):
        plain.encode([tall])


@pytest.mark.parametrize("cls", [Flux1, Flux1Fill])
def test_a_network_of_the_other_kind_is_refused(family, cls, tmp_path):
    path = family.path if cls is Flux1 else build_flux(tmp_path)
    policy = cls(path, height=48, width=64)
    for work in (policy.plan, lambda: policy.load(torch.device("cpu"))):
        with pytest.raises(ValueError, match=r"channels, Flux1\w* provides") as caught:
            work()
        assert len(str(caught.value).splitlines()) <= 5


def test_the_state_has_the_channels_of_the_autoencoder_and_the_plan_counts_its_tokens(family):
    plan = Flux1Fill(family.path, height=48, width=64, max_sequence_length=40).plan()
    assert plan.latent_shape == (16, 6, 8)
    assert plan.activation_bytes == 2 * 34 * (3 * 4 + 40) * 32 * 2
