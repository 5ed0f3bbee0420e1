"""Adapters that other toolkits saved load as the networks that they trained."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from diffusers.utils import convert_state_dict_to_diffusers
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict

from pipelines.network.weights import Lora
from tests.fixtures.embedded import FOLDER, new_sd3
from tests.fixtures.families import noise, requests_for
from tests.fixtures.tiny_unet import build_sd15, new_sd15

pytestmark = pytest.mark.slow

LAYERS = ("to_q", "to_k", "to_v", "to_out.0")
PROMPTS = ("a red circle", "two blue squares")


def stir(network) -> None:
    """Give every matrix of an adapter random values, as training does."""
    generator = torch.Generator().manual_seed(5)
    for name, weight in network.named_parameters():
        if ".lora_" in name:
            weight.data = 0.3 * torch.randn(weight.shape, generator=generator)


def velocity(policy) -> torch.Tensor:
    """Return the velocity at noise."""
    cond = policy.encode(requests_for(policy, PROMPTS))
    with torch.no_grad():
        return policy.velocity(noise(policy), policy.schedule(4)[0], cond)


def assert_same_network(policy, network, folder) -> None:
    """Assert that a loaded adapter acts like the foreign network, whose adapter is merged."""
    before = velocity(policy)
    policy.load_weights(str(folder))
    loaded = velocity(policy)
    assert (loaded - before).abs().max() > 1e-2
    own = policy.denoiser.state_dict()
    with torch.no_grad():
        for name, weight in network.state_dict().items():
            layer, _, kind = name.rpartition(".")
            own.get(name, own.get(f"{layer}.base_layer.{kind}")).copy_(weight)
        for name, weight in own.items():
            if ".lora_B." in name:
                weight.zero_()
    torch.testing.assert_close(velocity(policy), loaded, atol=1e-4, rtol=1e-4)


def lora(alpha: int) -> Lora:
    return Lora(rank=4, alpha=alpha, target_modules=LAYERS)


def trained_sd3():
    return SD3Transformer2DModel.from_pretrained(FOLDER, subfolder="transformer")


def test_a_folder_of_flow_grpo_diffusion_nft_and_flow_factory(tmp_path):
    """They save PEFT's wrapped transformer."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=list(LAYERS))
    wrapped = get_peft_model(trained_sd3(), config)
    stir(wrapped)
    wrapped.save_pretrained(str(tmp_path))
    assert_same_network(new_sd3(lora=lora(8)), wrapped.merge_and_unload(), tmp_path)


def test_a_file_of_the_scripts_of_diffusers_for_sd3(tmp_path):
    network = trained_sd3()
    network.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=list(LAYERS)))
    stir(network)
    state = get_peft_model_state_dict(network)
    StableDiffusion3Pipeline.save_lora_weights(tmp_path, transformer_lora_layers={**state})
    network.fuse_lora()
    network.unload_lora()
    assert_same_network(new_sd3(lora=lora(4)), network, tmp_path)


def test_a_file_of_the_dpo_script_of_diffusers_for_unets(tmp_path):
    folder = build_sd15(tmp_path / "model")
    network = UNet2DConditionModel.from_pretrained(folder, subfolder="unet")
    network.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=list(LAYERS)))
    stir(network)
    state = convert_state_dict_to_diffusers(get_peft_model_state_dict(network))
    StableDiffusionPipeline.save_lora_weights(tmp_path / "lora", unet_lora_layers=state)
    network.fuse_lora()
    network.unload_lora()
    assert_same_network(new_sd15(folder, lora=lora(4)), network, tmp_path / "lora")


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (lora(4), "lora.alpha 8, not 4: set policy.init_args.lora.alpha to 8"),
        (
            Lora(rank=2, alpha=2, target_modules=LAYERS),
            "lora.rank 4, not 2: set policy.init_args.lora.rank to 4",
        ),
    ],
)
@pytest.mark.parametrize("program", ["peft", "diffusers"])
def test_another_rank_or_alpha_is_refused_with_the_settings_to_change(
    tmp_path, own, message, program
):
    save(program, tmp_path, {})
    with pytest.raises(ValueError, match=re.escape(message)):
        new_sd3(lora=own).load_weights(str(tmp_path))


@pytest.mark.parametrize("program", ["peft", "diffusers"])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_rslora": True}, "was trained with use_rslora True, which is not supported: merge"),
        ({"alpha_pattern": {"to_q": 32}}, "was trained with alpha_pattern {'to_q': 32}"),
        ({"rank_pattern": {"to_q": 2}}, "was trained with rank_pattern {'to_q': 2}"),
        ({"use_dora": True}, "was trained with use_dora True"),
        ({"init_lora_weights": "pissa"}, "was trained with init_lora_weights pissa"),
    ],
)
def test_an_adapter_with_another_formula_is_refused(tmp_path, program, settings, message):
    save(program, tmp_path, settings)
    with pytest.raises(ValueError, match=re.escape(message)):
        new_sd3(lora=lora(8)).load_weights(str(tmp_path))


def test_an_adapter_that_is_not_finite_is_refused(tmp_path):
    policy = new_sd3(lora=lora(8))
    next(p for n, p in policy.denoiser.named_parameters() if ".lora_B." in n).data[0, 0] = torch.nan
    policy.save_weights(str(tmp_path))
    with pytest.raises(
        ValueError, match=r"safetensors has values that are not finite, in .*lora_B"
    ):
        new_sd3(lora=lora(8)).load_weights(str(tmp_path))


def save(program: str, folder: Path, settings: dict[str, Any]) -> None:
    """Save an adapter of rank 4 and alpha 8 as PEFT, or the scripts of diffusers, save it."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=list(LAYERS), **settings)
    if program == "peft":
        get_peft_model(trained_sd3(), config).save_pretrained(str(folder))
        return
    network = trained_sd3()
    network.add_adapter(config)
    StableDiffusion3Pipeline.save_lora_weights(
        folder,
        transformer_lora_layers={**get_peft_model_state_dict(network)},
        transformer_lora_adapter_metadata=network.peft_config["default"].to_dict(),
    )
