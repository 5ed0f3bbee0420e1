"""Writes adapters that have the same effect in diffusers, PEFT and ComfyUI, and reads them back.

    pytorch_lora_weights.safetensors  for diffusers and ComfyUI: lora_B is times alpha / rank
    adapter_model.safetensors         for PEFT, with adapter_config.json: as it was trained

Programs disagree about alpha: diffusers reads it from the metadata of a file, ComfyUI from tensors
that diffusers rejects, and other programs ignore it. The first file therefore folds alpha / rank
into lora_B and sets alpha = rank in its metadata. Programs that read only its tensors apply it at
strength 1. Folding is exact if alpha / rank is a power of two; otherwise it rounds lora_B once.
flowalign itself reads the second file.
"""

import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from flowalign.utils.adapters import TRAINED
from flowalign.utils.files import parse_json, read_object
from pipelines.parts.libraries import diffusers, peft
from pipelines.parts.tensors import (
    read_tensors,
    require_file,
    require_finite,
    require_same_shapes,
)

LORA_FILE = "pytorch_lora_weights.safetensors"
PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_METADATA = "lora_adapter_metadata"
_PEFT_PREFIX = "base_model.model."
_UNREAD = (
    *("use_rslora", "rank_pattern", "alpha_pattern", "use_dora", "use_qalora", "use_bdlora"),
    *("lora_bias", "modules_to_save", "layer_replication", "kasa_config", "velora_config"),
)
_INITIALS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Initial values of adapters that leave the base model as it is."""
_WAN_LAYERS = {
    **{f"attn1.to_{one}": f"self_attn.{one}" for one in "qkv"},
    **{f"attn2.to_{one}": f"cross_attn.{one}" for one in "qkv"},
    "attn1.to_out.0": "self_attn.o",
    "attn2.to_out.0": "cross_attn.o",
    "attn2.add_k_proj": "cross_attn.k_img",
    "attn2.add_v_proj": "cross_attn.v_img",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
}
"""Names of the layers in a Wan block: diffusers' name to the name in the original code and ComfyUI.
"""


def is_adapted(denoiser: Any) -> bool:
    """Return whether the denoiser has a LoRA adapter."""
    return bool(denoiser._hf_peft_config_loaded)


def adapter_place(part: str, folder: str) -> tuple[str, Path]:
    """Return a component's name inside adapter files, and the folder of its files.

    diffusers gives both networks of Wan 2.2 the same name, so the second one has a separate folder.
    """
    name = part.removesuffix("_2")
    return name, Path(folder) if name == part else Path(folder) / part


def save_adapter(part: str, denoiser: Any, folder: str) -> None:
    """Save the adapter for diffusers and ComfyUI, and for PEFT."""
    save_for_diffusers(part, denoiser, folder)
    save_for_peft(part, denoiser, folder)


def save_for_diffusers(
    part: str, denoiser: Any, folder: str, dtype: torch.dtype = torch.float32
) -> None:
    """Save the adapter with alpha / rank folded into lora_B, under keys that diffusers reads."""
    name, where = adapter_place(part, folder)
    where.mkdir(parents=True, exist_ok=True)
    config, trained = denoiser.peft_config[TRAINED], adapter_tensors(denoiser)
    keys = adapter_keys(name, denoiser, trained)
    strength = config.lora_alpha / config.r
    acting = {keys[n]: t * strength if ".lora_B." in n else t for n, t in trained.items()}
    metadata = {f"{name}.{k}": v for k, v in (_plain(config) | {"lora_alpha": config.r}).items()}
    about = {"format": "pt", _METADATA: json.dumps(metadata, indent=2, sort_keys=True)}
    save_file({key: t.to(dtype) for key, t in acting.items()}, where / LORA_FILE, about)


def save_for_peft(
    part: str, denoiser: Any, folder: str, dtype: torch.dtype = torch.float32
) -> None:
    """Save the adapter as it was trained, with the alpha of every layer and the PEFT config."""
    _, where = adapter_place(part, folder)
    where.mkdir(parents=True, exist_ok=True)
    config, trained = denoiser.peft_config[TRAINED], adapter_tensors(denoiser)
    copies = {n: t.to(dtype) for n, t in trained.items()}
    layers = {n.partition(".lora_")[0] for n in trained}
    copies |= {f"{n}.alpha": torch.tensor(float(config.lora_alpha)) for n in layers}  # for ComfyUI
    save_file({_PEFT_PREFIX + n: t for n, t in copies.items()}, where / PEFT_FILE, {"format": "pt"})
    plain = _plain(config) | {"inference_mode": True}
    (where / PEFT_CONFIG).write_text(json.dumps(plain, indent=2, sort_keys=True), encoding="utf-8")


def _plain(config: Any) -> dict[str, Any]:
    return json.loads(json.dumps(config.to_dict(), default=sorted))


def load_adapter(part: str, denoiser: Any, folder: str) -> None:
    """Load files that `save_adapter` or PEFT wrote, or a single file for diffusers.

    Raises:
        ValueError: Tensors are missing, unexpected or not finite, or the adapter was trained with
            another rank, alpha or formula.
    """
    name, where = adapter_place(part, folder)
    file = where / PEFT_FILE
    if file.is_file():
        state, about = _read_peft(where)
    else:
        file = require_file(where / LORA_FILE)
        state, about = _read_diffusers(name, denoiser, file)
    check_formula(about, file)
    config = denoiser.peft_config[TRAINED]
    pairs = {"rank": (about.get("r"), config.r), "alpha": (about["lora_alpha"], config.lora_alpha)}
    for setting, (was, now) in pairs.items():
        if was not in (None, now):
            raise ValueError(
                f"{file} was trained with lora.{setting} {was}, not {now}: "
                f"set policy.init_args.lora.{setting} to {was}"
            )
    require_same_shapes(state, adapter_tensors(denoiser), file)
    require_finite(state, file)
    peft.set_peft_model_state_dict(denoiser, state)


def check_formula(about: Mapping[str, Any], file: Path) -> None:
    """Raise ValueError if an adapter's settings scale or change layers in a way that is not read.

    Only alpha / rank is read, equal in all layers.
    """
    changed = {name: about[name] for name in _UNREAD if about.get(name)}
    if about.get("init_lora_weights") not in _INITIALS:
        changed["init_lora_weights"] = about["init_lora_weights"]  # it changes the base model
    for name, value in changed.items():
        raise ValueError(
            f"{file} was trained with {name} {str(value)[:60]}, which is not supported: merge the "
            "adapter into its base model with PEFT, and set policy.init_args.path to the result"
        )


def load_into_pipeline(pipe: Any, part: str, folder: str, name: str | None = None) -> None:
    """Load a saved adapter as a user of plain diffusers does; `name` is its name there."""
    prefix, where = adapter_place(part, folder)
    more = {} if name is None else {"adapter_name": name}
    second = {} if prefix == part else {f"load_into_{part}": True}
    with without_warnings():
        if "load_lora_weights" in dir(pipe):
            pipe.load_lora_weights(where, **second, **more)
        else:  # its network has a loader
            network = pipe.components[part]
            network.load_lora_adapter(where, prefix=prefix, weight_name=LORA_FILE, **more)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Hide that peft gets a second adapter, and that the text encoders have none."""
    level = diffusers.utils.logging.get_verbosity()
    diffusers.utils.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        diffusers.utils.logging.set_verbosity(level)


def difference_of_copy(part: str, denoiser: Any, folder: str) -> float:
    """Return the largest difference of the adapter from the file that flowalign reads."""
    _, where = adapter_place(part, folder)
    state, _ = _read_peft(where)
    trained = {n: t.detach().cpu() for n, t in adapter_tensors(denoiser).items()}
    return max(float((state[n] - t).abs().max()) for n, t in trained.items())


@contextmanager
def fold_alpha(denoisers: Iterable[Any]) -> Iterator[None]:
    """Fold alpha / rank into lora_B inside this context, as in the file for diffusers.

    Velocities change by rounding only, and not at all if alpha / rank is a power of two.
    """
    layers: list[tuple[Any, Any, float]] = [
        (layer, layer.lora_B[TRAINED].weight, layer.scaling[TRAINED])
        for denoiser in denoisers
        for layer in denoiser.modules()
        if isinstance(layer, peft.tuners.lora.LoraLayer) and TRAINED in layer.lora_B
    ]
    kept = [weight.data for _, weight, _ in layers]
    for layer, weight, strength in layers:
        weight.data, layer.scaling[TRAINED] = weight.data * strength, 1.0
    try:
        yield
    finally:
        for (layer, weight, strength), data in zip(layers, kept, strict=True):
            weight.data, layer.scaling[TRAINED] = data, strength


def adapter_keys(part: str, denoiser: Any, names: Iterable[str]) -> dict[str, str]:
    """Return the keys of adapter tensors in the file for diffusers, which ComfyUI also reads.

    If ComfyUI's network has other layer names than diffusers' network, the keys use a form that
    both can read: the original names for Wan, LTX-Video and LTX-2, and the attention processors'
    names for UNets. If an adapter has layers outside of Wan's blocks, it keeps diffusers' names.
    """
    if isinstance(denoiser, diffusers.UNet2DConditionModel):
        return {name: _unet_key(name) for name in names}
    ltx = diffusers.LTXVideoTransformer3DModel, diffusers.LTX2VideoTransformer3DModel
    if isinstance(denoiser, ltx):
        return {name: f"diffusion_model.{name}" for name in names}
    plain = {name: f"{part}.{name}" for name in names}
    if not isinstance(denoiser, diffusers.WanTransformer3DModel):
        return plain
    parted = {name: re.fullmatch(r"(blocks\.\d+)\.(.+)(\.lora_.+)", name) for name in plain}
    known = {
        name: f"diffusion_model.{found[1]}.{_WAN_LAYERS[found[2]]}{found[3]}"
        for name, found in parted.items()
        if found and found[2] in _WAN_LAYERS
    }
    return known if known.keys() == plain.keys() else plain


def _unet_key(name: str) -> str:
    layer, _, matrix = name.partition(".lora_")
    end = {"A.weight": "lora.down.weight", "B.weight": "lora.up.weight"}[matrix]
    attention = re.fullmatch(r"(.+)\.(to_[qkv]|to_out)(?:\.0)?", layer)
    if attention:
        return f"unet.{attention[1]}.processor.{attention[2]}_{end}"
    return f"unet.{layer}.{end}"


def _peft_name(key: str) -> str:
    """Return PEFT's name of a tensor that a training script of diffusers saved for a UNet."""
    return key.replace(".lora.down.", ".lora_A.").replace(".lora.up.", ".lora_B.")


def adapter_tensors(denoiser: Any) -> dict[str, Tensor]:
    """Return the adapter's tensors, keyed by their names in the network."""
    state: Any = peft.get_peft_model_state_dict(denoiser)
    return {name: tensor.contiguous() for name, tensor in state.items()}


def _read_peft(where: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors as they were trained, and their settings."""
    found = read_tensors(require_file(where / PEFT_FILE))
    state = {k.removeprefix(_PEFT_PREFIX): v for k, v in found.items() if not k.endswith(".alpha")}
    return state, {"lora_alpha": None} | read_object(require_file(where / PEFT_CONFIG))


def _read_diffusers(
    part: str, denoiser: Any, file: Path
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and settings of a diffusers file that has no PEFT file next to it."""
    found = read_tensors(file)
    keys = adapter_keys(part, denoiser, adapter_tensors(denoiser))
    names = {key: name for name, key in keys.items()}
    state = {names.get(k) or _peft_name(k.removeprefix(f"{part}.")): v for k, v in found.items()}
    with safe_open(file, "pt") as opened:
        about = parse_json((opened.metadata() or {}).get(_METADATA, "{}"))
    rank = next((len(t) for name, t in state.items() if ".lora_A." in name), None)
    own = {name.removeprefix(f"{part}."): value for name, value in about.items()}
    return state, {"r": rank, "lora_alpha": rank} | own
