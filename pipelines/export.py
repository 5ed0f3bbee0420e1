"""Writes trained weights in the forms that other programs read, and reads them back."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from flowalign.types import Exportable, ExportDtype, ExportTarget
from pipelines.adapter_files import (
    PEFT_CONFIG,
    PEFT_FILE,
    adapter_keys,
    adapter_place,
    adapter_tensors,
    alphas,
    load_into_pipeline,
    save_for_diffusers,
    save_for_peft,
)
from pipelines.folder import config_of, read_json
from pipelines.tensors import existing
from pipelines.weights import DTYPES, Lora, load_pipeline, prepare_training

if TYPE_CHECKING:
    from pipelines.base import DiffusersPolicy

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
"""What stands before the layers of a network in the adapters that ComfyUI reads, by class.

Source: keys that ComfyUI's loader knows for Stable Diffusion, SD3, FLUX.1, FLUX.2, Wan, LTX-Video,
Qwen-Image, Z-Image and Krea 2; for LTX-2 what SimpleTuner and ai-toolkit write.
"""


class ExportsWeights(Exportable):
    """Exports the weights of a `DiffusersPolicy`, which is one of these."""

    def check_export(self: Any, folder: str, target: ExportTarget) -> None:
        self.plan()
        check_export(self, folder, target)

    def export_weights(
        self: Any, out: str, target: ExportTarget, dtype: ExportDtype
    ) -> float | None:
        return export(self, out, target, DTYPES[dtype])


def check_export(policy: "DiffusersPolicy", folder: str, target: ExportTarget) -> None:
    """Check by names and shapes that the weights of a folder can be written for a target.

    Raises:
        ValueError: The adapter is of another network, there is none, or ComfyUI does not know the
            network.
    """
    kind = policy.transformer_class.__name__
    if target == "comfyui" and kind not in COMFYUI_PREFIXES:
        raise ValueError(
            f"no key is known by which ComfyUI reads an adapter of {kind}; "
            "export to diffusers, peft or merged"
        )
    if policy.lora is None:
        if target != "merged":
            raise ValueError(f"{folder} has no adapter, but a whole network: export to merged")
        return
    for part in policy.parts:
        _check_fits(policy, part, folder)


def _check_fits(policy: "DiffusersPolicy", part: str, folder: str) -> None:
    _, where = adapter_place(part, folder)
    about = read_json(existing(where / PEFT_CONFIG))
    lora = Lora(
        rank=about["r"],
        alpha=about["lora_alpha"],
        target_modules=tuple(about["target_modules"]),
    )
    with torch.device("meta"):
        config = config_of(policy.pipeline_class, policy.path, part)
        network: Any = policy.transformer_class.from_config(config)
    try:
        prepare_training(network, lora)
    except ValueError as error:  # no layer has such a name
        raise ValueError(_stranger(policy, where)) from error
    wanted = {name: list(tensor.shape) for name, tensor in adapter_tensors(network).items()}
    with safe_open(existing(where / PEFT_FILE), "pt") as file:
        shapes = {
            name.removeprefix("base_model.model."): file.get_slice(name).get_shape()
            for name in file.keys()  # noqa: SIM118 (a file is no mapping)
            if not name.endswith(".alpha")
        }
    if shapes != wanted:
        raise ValueError(_stranger(policy, where))


def _stranger(policy: "DiffusersPolicy", where: Path) -> str:
    return (
        f"the adapter in {where} does not fit the {policy.transformer_class.__name__} of "
        f"{policy.path}; name the model that it was trained on by --model"
    )


def export(
    policy: "DiffusersPolicy", out: str, target: ExportTarget, dtype: torch.dtype
) -> float | None:
    """Write the weights of a loaded policy, and return how far what is read back is from them.

    The difference is that of velocities of two samples; None for ComfyUI, which is not at hand:
    its file is read back tensor by tensor. An adapter is rounded to the dtype first.
    """
    if target == "merged":
        return _merged(policy, out, dtype)
    for part in policy.parts:
        network = policy.pipe.components[part]
        _round(network, dtype)
        if target == "diffusers":
            save_for_diffusers(part, network, out, dtype)
        elif target == "peft":
            save_for_peft(part, network, out, dtype)
        else:
            _save_for_comfyui(part, network, out, dtype)
    return None if target == "comfyui" else _difference(policy, out, target)


def _round(network: Any, dtype: torch.dtype) -> None:
    """Round the adapter to values of a dtype; alpha / rank stays apart from it."""
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype).to(parameter.dtype)


def _save_for_comfyui(part: str, network: Any, out: str, dtype: torch.dtype) -> None:
    name, where = adapter_place(part, out)
    where.mkdir(parents=True, exist_ok=True)
    prefix = COMFYUI_PREFIXES[type(network).__name__]
    trained = adapter_tensors(network)
    keys = adapter_keys(name, network, trained)
    if prefix != "unet" and not all(key.startswith(f"{prefix}.") for key in keys.values()):
        if type(network).__name__ == "WanTransformer3DModel":
            raise ValueError("the adapter has layers outside of Wan's blocks, which ComfyUI misses")
        keys = {own: f"{prefix}.{own}" for own in trained}
    tensors = {keys[own]: tensor.to(dtype) for own, tensor in trained.items()}
    layers = {re.split(r"[._]lora[._]", key)[0] for key in tensors}
    alpha = next(iter(alphas(network.peft_config["default"], ["any.lora_A"]).values()))
    tensors |= {f"{layer}.alpha": alpha.clone() for layer in layers}
    save_file(tensors, where / COMFYUI_FILE, {"format": "pt"})
    back = load_file(where / COMFYUI_FILE)
    if any(not torch.equal(back[key], tensor) for key, tensor in tensors.items()):
        raise OSError(f"{where / COMFYUI_FILE} was not written as it should be")


def _velocity(policy: "DiffusersPolicy") -> torch.Tensor:
    x = policy.noise(2, torch.Generator().manual_seed(0))
    early = policy.schedule(4)[1]
    sigma = torch.stack([early, early / 20])  # low noise may use another network
    with torch.no_grad():
        return policy.velocity(x, sigma, policy.encode(policy.probes()))


def _difference(policy: "DiffusersPolicy", out: str, target: ExportTarget) -> float:
    """Compare with new networks that the public loader of the target gave the adapter."""
    expected, mine = _velocity(policy), policy.denoiser
    dtype, components = DTYPES[policy.precision], policy.pipe.components
    fresh = load_pipeline(policy.pipeline_class, policy.path, dtype, **policy.unused)
    networks = {}
    for part in policy.parts:
        if target == "diffusers":
            load_into_pipeline(fresh, part, out)
            networks[part] = fresh.components[part]
        else:
            _, where = adapter_place(part, out)
            loaded: Any = PeftModel.from_pretrained(fresh.components[part], str(where))
            networks[part] = loaded.base_model.model
        networks[part].to(expected.device)
        _keep_float32(networks[part])
    policy.denoiser = policy.assembled({**components, **networks})
    try:
        return float((_velocity(policy) - expected).abs().max())
    finally:
        policy.denoiser = mine


def _keep_float32(network: Any) -> None:
    """Compute with the adapter in float32, as in training."""
    for name, parameter in network.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()


def _merged(policy: "DiffusersPolicy", out: str, dtype: torch.dtype) -> float:
    """Write the pipeline with the trained network, and compare it with what is read back."""
    components = policy.pipe.components
    for part in policy.parts:
        network = components[part]
        if policy.lora is not None:
            network.fuse_lora()
            network.unload_lora()
        network.requires_grad_(False)
    for part in components.values():
        if isinstance(part, torch.nn.Module):
            torch.nn.Module.to(part, dtype)
    policy.pipe.save_pretrained(out)
    fresh = load_pipeline(policy.pipeline_class, out, dtype, **policy.unused)
    differences = [
        float((mine.float() - theirs.float().to(mine.device)).abs().max())
        for part in policy.parts
        for mine, theirs in zip(
            components[part].state_dict().values(),
            fresh.components[part].state_dict().values(),
            strict=True,
        )
    ]
    return max(differences)
