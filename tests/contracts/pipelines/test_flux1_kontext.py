"""Properties of FLUX.1 Kontext: the tokens of the source image follow those of the state."""

from dataclasses import replace

import pytest
import torch
from diffusers import FluxKontextPipeline

from flowalign.types import Request
from pipelines.families.flux1 import Flux1Kontext
from pipelines.network.weights import Lora
from tests.fixtures.embedded import move
from tests.fixtures.families import assert_official, noise, ours, without_gradient
from tests.fixtures.pictures import EDITS, picture

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plain_kontext(kontext):
    return kontext.new()


@pytest.mark.parametrize(("height", "width"), [(48, 64), (32, 32)])
def test_any_size_and_guidance_is_that_of_the_official_pipeline(kontext, height, width):
    edits = [replace(e, references=(picture(k, height, width),)) for k, e in enumerate(EDITS)]
    policy = kontext.new(height=height, width=width, embedded_guidance=3.5)
    move(policy)
    assert_official(kontext, policy, edits)


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.prompt)
def test_one_request_gives_the_latents_of_the_official_pipeline_to_the_last_bit(kontext, edit):
    policy = kontext.new(embedded_guidance=2.5)
    move(policy)
    x = noise(policy, 1)
    official = kontext.official(policy, [edit], x, 4, "latent")
    assert torch.equal(ours(policy, [edit], x, 4), official)


def test_the_picture_and_the_instruction_change_the_velocity(kontext):
    policy = kontext.new()
    x, sigma = noise(policy), torch.tensor(0.6)
    swapped = [replace(a, references=b.references) for a, b in zip(EDITS, EDITS[::-1], strict=True)]
    renamed = [replace(a, prompt=b.prompt) for a, b in zip(EDITS, EDITS[::-1], strict=True)]
    with torch.no_grad():
        velocity = policy.velocity(x, sigma, policy.encode(EDITS))
        for other in (swapped, renamed):
            changed = policy.velocity(x, sigma, policy.encode(other))
            assert (changed - velocity).flatten(1).abs().amax(1).min() > 1e-3


def test_a_picture_of_another_size_is_resized_and_cropped_to_the_policy_s(plain_kontext):
    wide, large = picture(3, 48, 96), picture(3, 96, 192)
    for reference in (wide, large):
        source = plain_kontext.encode([Request("a", (reference,))])["source"]
        assert torch.equal(source, plain_kontext.embed(reference.read()[None]))
    middle = plain_kontext.embed(wide.read()[None, ..., 16:80])
    assert torch.equal(plain_kontext.encode([Request("a", (wide,))])["source"], middle)


@pytest.mark.parametrize("count", [0, 2])
def test_another_number_of_pictures_than_one_is_refused(plain_kontext, count):
    edit = Request("make it red", (picture(1), picture(2))[:count])
    with pytest.raises(ValueError, match=f"Flux1Kontext takes 1 source .* has {count}"):
        plain_kontext.encode([EDITS[0], edit])


def test_a_clip_as_the_picture_is_refused(plain_kontext):
    with pytest.raises(ValueError, match="samples have 3 frames"):
        plain_kontext.encode([Request("make it red", (picture(1, frames=3),))])


def test_the_memory_estimate_counts_the_tokens_of_the_picture(kontext):
    size = {"height": 48, "width": 64, "max_sequence_length": 40}
    plan = Flux1Kontext(kontext.path, **size).plan()
    assert plan.activation_bytes == 2 * 34 * (2 * 3 * 4 + 40) * 32 * 2
    assert plan.latent_shape == (16, 6, 8)


def test_the_name_of_the_conditioning_depends_on_how_pictures_are_encoded(kontext):
    """Its latents are those of the policy's size and of its autoencoder."""
    policy = kontext.new()
    before = policy.encoders()
    assert kontext.new(height=32, width=32).encoders()[1] != before[1]
    with torch.no_grad():
        next(policy.pipe.vae.parameters()).flatten()[3] += 1e-3
    assert policy.encoders()[1] != before[1]


def test_the_pipeline_of_plain_diffusers_makes_the_picture_of_the_trained_policy(kontext, tmp_path):
    layers = kontext.new().lora.target_modules
    policy = kontext.new(lora=Lora(rank=3, alpha=6, target_modules=layers))
    move(policy)
    policy.save_weights(str(tmp_path))
    official = kontext.official(policy, EDITS, noise(policy), 3, "pt")
    fresh = kontext.new(lora=None)
    fresh.pipe = FluxKontextPipeline.from_pretrained(kontext.path)
    fresh.pipe.load_lora_weights(tmp_path)
    assert torch.equal(kontext.official(fresh, EDITS, noise(policy), 3, "pt"), official)


def test_a_gradient_reaches_every_layer_of_the_adapter(kontext):
    assert without_gradient(kontext.new(), kontext.prompts) == set()
