"""FLUX.2 dev satisfies the contract of policies; its guidance is an input of the network."""

import pytest
import torch

from pipelines.families.flux2 import LORA, Flux2
from tests.fixtures.embedded import move
from tests.fixtures.families import Family, assert_official, noise, without_gradient
from tests.fixtures.image_families import flux2_family
from tests.fixtures.policy_contract import PictureContract
from tests.fixtures.tiny_images import build_flux2

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Family:
    return flux2_family(tmp_path_factory.mktemp("flux2"))


@pytest.fixture(scope="module")
def plain(family):
    return family.new()


class TestFlux2(PictureContract):
    """On the tiny pipeline."""


@pytest.mark.parametrize(("height", "width", "guidance"), [(32, 64, 4.0), (64, 64, 1.0)])
def test_any_size_and_guidance_is_that_of_the_official_pipeline(family, height, width, guidance):
    policy = family.new(height=height, width=width, embedded_guidance=guidance)
    move(policy)
    assert_official(family, policy, family.prompts)


def test_a_seed_draws_the_noise_that_it_draws_in_the_official_pipeline(family, plain):
    """The pipeline draws patches, of 16 channels here, before it packs them."""
    x = noise(plain)
    sizes = {"height": plain.height, "width": plain.width, "max_sequence_length": 384}
    drawn = plain.pipe(
        prompt=list(family.prompts),
        num_inference_steps=2,
        guidance_scale=plain.embedded_guidance,
        generator=torch.Generator().manual_seed(5),
        output_type="latent",
        **sizes,
    ).images
    found = family.official(plain, family.prompts, x, 2, "latent")
    assert torch.equal(drawn.mT.unflatten(2, plain.grid), found)


def test_the_schedule_depends_on_the_number_of_steps_beyond_its_length(plain):
    """The shift of 12 tokens falls with the number of steps, so no schedule is part of another."""
    few, many = plain.schedule(4), plain.schedule(8)
    assert few[0] == many[0] == 1
    assert (few[1:-1] - many[2:-1:2]).abs().min() > 1e-4


def test_the_adapter_is_on_both_kinds_of_blocks_whatever_their_number(family):
    """The target list names 48 single blocks; this network has 2."""
    policy = family.new(lora=LORA)
    adapted = {
        n.removesuffix(".lora_A.default")
        for n, _ in policy.denoiser.named_modules()
        if n.endswith(".lora_A.default")
    }
    attention = {f"transformer_blocks.0.attn.{n}" for n in ("to_q", "to_k", "to_v", "to_out.0")}
    single = {
        f"single_transformer_blocks.{i}.attn.{n}"
        for i in (0, 1)
        for n in ("to_qkv_mlp_proj", "to_out")
    }
    assert adapted == attention | single
    assert without_gradient(family.new(), family.prompts) == set()


def test_a_network_without_guidance_as_an_input_is_refused_before_weights(tmp_path):
    path = build_flux2(tmp_path, guidance_embeds=False)
    with pytest.raises(ValueError, match=r"does not take guidance .*\n.*Flux2Klein"):
        Flux2(path, height=32, width=32).plan()
