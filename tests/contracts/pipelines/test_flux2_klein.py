"""FLUX.2-klein satisfies the contract of policies; its guidance is classifier-free."""

import json
from pathlib import Path

import pytest
import torch

from pipelines.families.flux2 import Flux2Klein
from tests.fixtures.families import noise, requests_for
from tests.fixtures.image_families import flux2_latents, official_flux2
from tests.fixtures.policy_contract import PictureContract
from tests.fixtures.tiny_families import family_fixture, sizes
from tests.fixtures.tiny_images import build_flux2

pytestmark = pytest.mark.slow


family = family_fixture(
    "flux2_klein",
    Flux2Klein,
    official_flux2,
    {"num_attention_heads": 3},
    latents=flux2_latents,
    guided={"guidance": 3.0},
    cases=sizes("guidance", (48, 64, 4.0), (64, 32, 1.0)),
)


class TestFlux2Klein(PictureContract):
    """On the tiny pipeline."""


def test_the_length_of_the_padding_is_part_of_the_model(family, plain):
    """The network attends to padding, so another length gives another velocity."""
    longer, x = family.new(max_sequence_length=80), noise(plain)
    with torch.no_grad():
        velocities = [
            policy.velocity(
                x, torch.tensor(0.5), policy.encode(requests_for(policy, family.prompts))
            )
            for policy in (plain, longer)
        ]
    assert (velocities[0] - velocities[1]).abs().max() > 1e-3


def test_guidance_is_refused_where_the_folder_says_that_it_is_distilled(tmp_path):
    path = build_flux2(tmp_path, klein=True)
    index = Path(path, "model_index.json")
    index.write_text(json.dumps(json.loads(index.read_text()) | {"is_distilled": True}))
    assert Flux2Klein(path, height=32, width=32, guidance=1.0).plan().latent_shape == (16, 2, 2)
    with pytest.raises(ValueError, match=r"guidance is 4.0, .* is distilled .*train the base"):
        Flux2Klein(path, height=32, width=32).plan()


def test_dev_is_refused_before_weights_with_the_policy_that_takes_it(tmp_path):
    path = build_flux2(tmp_path, klein=True, guidance_embeds=True)
    with pytest.raises(ValueError, match=r"takes guidance .*\n.*pipelines.Flux2,"):
        Flux2Klein(path, height=32, width=32).plan()
