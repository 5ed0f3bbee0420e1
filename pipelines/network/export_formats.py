"""Writes trained weights in the formats of other programs, and reads them back."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from flowalign.types import ExportTarget, Policy
from flowalign.utils.files import read_object
from pipelines.network.adapter_files import (
    PEFT_CONFIG,
    PEFT_FILE,
    adapter_keys,
    adapter_place,
    adapter_tensors,
    check_formula,
    load_into_pipeline,
    save_for_diffusers,
    save_for_peft,
)
from pipelines.network.denoisers import Denoisers, keep_dtype
from pipelines.network.verification import VerificationSamples
from pipelines.network.weights import Lora, load_pipeline, prepare_training
from pipelines.parts.libraries import peft
from pipelines.parts.tensors import require_file

COMFYUI_FILE = "comfyui_lora.safetensors"
COMFYUI_PREFIXES = {
    **dict.fromkeys(("SD3Transformer2DModel", "FluxTransformer2DModel"), "transformer"),
    **dict.fromkeys(("QwenImageTransformer2DModel", "Flux2Transformer2DModel"), "transformer"),
    **dict.fromkeys(("ZImageTransformer2DModel", "Krea2Transformer2DModel"), "diffusion_model"),
    **dict.fromkeys(
        ("LTXVideoTransformer3DModel", "LTX2VideoTransformer3DModel"), "diffusion_model"
    ),
    "WanTransformer3DModel": "diffusion_model",
    "UNet2DConditionModel": "unet",
}
"""Prefix of layer names in adapters that ComfyUI reads, by network class.

Source: keys that ComfyUI's loader accepts for Stable Diffusion, SD3, FLUX.1, FLUX.2, Wan,
LTX-Video, Qwen-Image, Z-Image and Krea 2; for LTX-2 the keys that SimpleTuner and ai-toolkit write.
"""


def check_export(network: Denoisers, folder: str, target: ExportTarget) -> None:
    """Check from names and shapes that the weights in a folder can be exported to a target.

    Raises:
        ValueError: The adapter belongs to another network or is missing, or ComfyUI does not
            support the network.
    """
    kind = network.kind
    if target == "comfyui" and kind not in COMFYUI_PREFIXES:
        raise ValueError(
            f"ComfyUI has no known key prefix for adapters of {kind}; "
            "export to diffusers, peft or merged"
        )
    if network.lora is None:
        if target != "merged":
            raise ValueError(f"{folder} has a whole network and no adapter: export to merged")
        return
    for part in network.trained:
        _check_fits(network, part, folder)


def _check_fits(network: Denoisers, part: str, folder: str) -> None:
    _, where = adapter_place(part, folder)
    about = read_object(require_file(where / PEFT_CONFIG))
    check_formula(about, where / PEFT_CONFIG)
    layers = tuple(about["target_modules"])
    lora = Lora(rank=about["r"], alpha=about["lora_alpha"], target_modules=layers)
    with torch.device("meta"):
        denoiser = network.on_meta(part)
    try:
        prepare_training(denoiser, lora)
    except ValueError as error:  # no layer matches target_modules
        raise ValueError(_describe_misfit(network, where)) from error
    wanted = {name: list(tensor.shape) for name, tensor in adapter_tensors(denoiser).items()}
    with safe_open(require_file(where / PEFT_FILE), "pt") as file:
        shapes = {
            name.removeprefix("base_model.model."): file.get_slice(name).get_shape()
            for name in file.keys()  # noqa: SIM118 (a file is no mapping)
            if not name.endswith(".alpha")
        }
    if shapes != wanted:
        raise ValueError(_describe_misfit(network, where))


def _describe_misfit(network: Denoisers, where: Path) -> str:
    return (
        f"the adapter in {where} does not fit the {network.kind} of "
        f"{network.folder.path}; set --model to the model that it was trained on"
    )


def export(
    network: Denoisers, policy: Policy, out: str, target: ExportTarget, dtype: torch.dtype
) -> float | None:
    """Write the weights of a loaded policy, and return the difference after reading them back.

    The difference is the largest one between velocities of two samples. For ComfyUI it is None,
    because ComfyUI is not installed; its file is compared tensor by tensor. An adapter is rounded
    to `dtype` first.
    """
    if target == "merged":
        return _merge(network, out, dtype)
    writers = {"diffusers": save_for_diffusers, "peft": save_for_peft}
    for name in network.trained:
        denoiser = network.components[name]
        for parameter in denoiser.parameters():
            if parameter.requires_grad:  # rounded before alpha / rank is folded into it
                parameter.data = parameter.data.to(dtype).to(parameter.dtype)
        writers.get(target, _save_for_comfyui)(name, denoiser, out, dtype)
    if target == "comfyui":
        return None
    return _difference(network, VerificationSamples(policy, len(network.names)), out, target)


def _save_for_comfyui(part: str, network: Any, out: str, dtype: torch.dtype) -> None:
    name, where = adapter_place(part, out)
    where.mkdir(parents=True, exist_ok=True)
    prefix = COMFYUI_PREFIXES[type(network).__name__]
    trained = adapter_tensors(network)
    keys = adapter_keys(name, network, trained)
    if prefix != "unet" and not all(key.startswith(f"{prefix}.") for key in keys.values()):
        if type(network).__name__ == "WanTransformer3DModel":
            raise ValueError(
                "the adapter has layers outside of Wan's blocks, which ComfyUI does not load"
            )
        keys = {own: f"{prefix}.{own}" for own in trained}
    tensors = {keys[own]: tensor.to(dtype) for own, tensor in trained.items()}
    layers = {re.split(r"[._]lora[._]", key)[0] for key in tensors}
    alpha = float(network.peft_config["default"].lora_alpha)
    tensors |= {f"{layer}.alpha": torch.tensor(alpha) for layer in layers}
    save_file(tensors, where / COMFYUI_FILE, {"format": "pt"})
    back = load_file(where / COMFYUI_FILE)
    if any(not torch.equal(back[key], tensor) for key, tensor in tensors.items()):
        raise OSError(f"{where / COMFYUI_FILE} differs from the adapter after writing")


def _difference(
    network: Denoisers, probe: VerificationSamples, out: str, target: ExportTarget
) -> float:
    """Return the velocity difference to networks loaded by the public loader of the target."""
    expected = probe.velocity(probe.policy.denoiser)
    fresh = load_pipeline(network.folder, network.dtype)
    read_back = {}
    for name in network.trained:
        if target == "diffusers":
            load_into_pipeline(fresh, name, out)
            read_back[name] = fresh.components[name]
        else:
            _, where = adapter_place(name, out)
            loaded: Any = peft.PeftModel.from_pretrained(fresh.components[name], str(where))
            read_back[name] = loaded.base_model.model
        read_back[name].to(expected.device)
        for parameter_name, parameter in read_back[name].named_parameters():
            if "lora_" in parameter_name:  # float32, as in training
                parameter.data = parameter.data.float()
        keep_dtype(read_back[name])
    return float((probe.velocity(network.join(read_back)) - expected).abs().max())


def _merge(network: Denoisers, out: str, dtype: torch.dtype) -> float:
    """Write the pipeline with merged weights, read them back, and return the difference."""
    components = network.components
    for name in network.trained:
        denoiser = components[name]
        if network.lora is not None:
            if dtype == torch.float32:  # in bf16 small updates would be lost in rounding
                torch.nn.Module.to(denoiser, dtype)
            denoiser.fuse_lora()
            denoiser.unload_lora()
        denoiser.requires_grad_(False)
    for component in components.values():
        if isinstance(component, torch.nn.Module):
            torch.nn.Module.to(component, dtype)
    network.pipe.save_pretrained(out)
    fresh = load_pipeline(replace(network.folder, path=out), dtype)
    differences = [
        float((mine.float() - theirs.float().to(mine.device)).abs().max())
        for name in network.trained
        for mine, theirs in zip(
            components[name].state_dict().values(),
            fresh.components[name].state_dict().values(),
            strict=True,
        )
    ]
    return max(differences)
