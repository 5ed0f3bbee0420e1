"""FLUX.2 dev satisfies the contract of policies; its guidance is an input of the network."""

import pytest

from pipelines.families.flux2 import LORA, Flux2
from tests.fixtures.families import without_gradient
from tests.fixtures.image_families import flux2_latents, official_flux2
from tests.fixtures.policy_contract import PictureContract
from tests.fixtures.tiny_families import family_fixture, sizes
from tests.fixtures.tiny_images import build_flux2

pytestmark = pytest.mark.slow


family = family_fixture(
    "flux2",
    Flux2,
    official_flux2,
    {"num_attention_heads": 3},
    latents=flux2_latents,
    cases=sizes("embedded_guidance", (48, 64, 2.0), (32, 64, 4.0), (64, 64, 1.0)),
)


class TestFlux2(PictureContract):
    """On the tiny pipeline."""


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
