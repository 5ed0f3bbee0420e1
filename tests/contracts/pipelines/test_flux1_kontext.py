"""Properties of FLUX.1 Kontext: the tokens of the source image follow those of the state."""

from dataclasses import replace

import pytest
import torch

from flowalign.types import Request
from pipelines.families.flux1 import Flux1Kontext
from tests.fixtures.embedded import move
from tests.fixtures.families import noise, official_kontext, ours
from tests.fixtures.pictures import EDITS, picture
from tests.fixtures.policy_contract import PictureContract
from tests.fixtures.tiny_families import family_fixture, sizes

pytestmark = pytest.mark.slow


family = family_fixture(
    "flux1_kontext",
    Flux1Kontext,
    official_kontext,
    {"num_attention_heads": 3},
    cases=sizes("embedded_guidance", (48, 64, 3.5), (32, 32, 3.5)),
)


class TestFlux1Kontext(PictureContract):
    pass


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.prompt)
def test_one_request_gives_the_latents_of_the_official_pipeline_to_the_last_bit(family, edit):
    policy = family.new(embedded_guidance=2.5)
    move(policy)
    x = noise(policy, 1)
    official = family.official(policy, [edit], x, 4, "latent")
    assert torch.equal(ours(policy, [edit], x, 4), official)


def test_the_picture_and_the_instruction_change_the_velocity(family):
    policy = family.new()
    x, sigma = noise(policy), torch.tensor(0.6)
    swapped = [replace(a, references=b.references) for a, b in zip(EDITS, EDITS[::-1], strict=True)]
    renamed = [replace(a, prompt=b.prompt) for a, b in zip(EDITS, EDITS[::-1], strict=True)]
    with torch.no_grad():
        velocity = policy.velocity(x, sigma, policy.encode(EDITS))
        for other in (swapped, renamed):
            changed = policy.velocity(x, sigma, policy.encode(other))
            assert (changed - velocity).flatten(1).abs().amax(1).min() > 1e-3


def test_a_picture_of_another_size_is_resized_and_cropped_to_the_policy_s(plain):
    wide, large = picture(3, 48, 96), picture(3, 96, 192)
    for reference in (wide, large):
        source = plain.encode([Request("a", (reference,))])["source"]
        assert torch.equal(source, plain.embed(reference.read()[None]))
    middle = plain.embed(wide.read()[None, ..., 16:80])
    assert torch.equal(plain.encode([Request("a", (wide,))])["source"], middle)


@pytest.mark.parametrize("count", [0, 2])
def test_another_number_of_pictures_than_one_is_refused(plain, count):
    edit = Request("make it red", (picture(1), picture(2))[:count])
    with pytest.raises(ValueError, match=f"Flux1Kontext takes 1 source .* has {count}"):
        plain.encode([EDITS[0], edit])


def test_a_clip_as_the_picture_is_refused(plain):
    with pytest.raises(ValueError, match="samples have 3 frames"):
        plain.encode([Request("make it red", (picture(1, frames=3),))])


def test_the_memory_estimate_counts_the_tokens_of_the_picture(family):
    size = {"height": 48, "width": 64, "max_sequence_length": 40}
    plan = Flux1Kontext(family.path, **size).plan()
    assert plan.activation_bytes == 2 * 34 * (2 * 3 * 4 + 40) * 32 * 2
    assert plan.latent_shape == (16, 6, 8)
