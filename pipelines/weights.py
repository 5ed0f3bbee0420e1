"""Prepares a denoiser for training, and saves its weights in the form that diffusers loads."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.models import ModelMixin
from diffusers.utils import logging as diffusers_logging
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from flowalign.types import PositiveInt

_ONE_FILE = "10TB"
LORA_FILE = "pytorch_lora_weights.safetensors"


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Configures a low-rank adapter on the denoiser."""

    rank: PositiveInt = 32
    alpha: PositiveInt = 64
    target_modules: tuple[str, ...] = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
    )
    """Name suffixes of the adapted linear layers. Source: Flow-GRPO's SD3 configuration."""


def load_pipeline(
    cls: type[DiffusionPipeline], path: str, dtype: torch.dtype, **components: Any
) -> Any:
    """Load a pipeline with all parts in one dtype, whatever dtype they were stored in.

    Layers that a model keeps in float32 stay so: with diffusers for example Wan's time embedding
    and norms, with transformers T5's last projections where the others are in float16. Given
    `components` are left unchanged.
    """
    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):  # some models draw weights before reading theirs
        pipe = cls.from_pretrained(path, dtype=dtype, **components)
    for name, part in pipe.components.items():
        if isinstance(part, torch.nn.Module) and name not in components:
            if not _keeps_float32(part, dtype):
                torch.nn.Module.to(part, dtype)  # diffusers' own `to` would warn
            part.eval().requires_grad_(False)
    return pipe


def _keeps_float32(part: torch.nn.Module, dtype: torch.dtype) -> bool:
    """Return whether `from_pretrained` keeps some of this model's layers in float32."""
    if isinstance(part, PreTrainedModel):
        always, in_float16 = part._keep_in_fp32_modules_strict, part._keep_in_fp32_modules
        return bool(always or (dtype == torch.float16 and in_float16))
    return isinstance(part, ModelMixin) and bool(part._keep_in_fp32_modules)


def prepare_training(denoiser: ModelMixin, lora: Lora | None) -> None:
    """Enable gradients, in float32, for the trained parameters only: the adapter or all."""
    if lora is None:
        denoiser.requires_grad_(True).float()
        return
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        init_lora_weights="gaussian",
        target_modules=list(lora.target_modules),
    )
    with torch.random.fork_rng(devices=[]):  # every rank and every run starts from the same adapter
        torch.random.default_generator.manual_seed(0)
        denoiser.add_adapter(config)
    for parameter in denoiser.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def save_weights(
    cls: type[DiffusionPipeline], part: str, denoiser: ModelMixin, folder: str
) -> None:
    """Save the adapter with its metadata (which holds alpha / rank), or the whole denoiser."""
    if not is_adapted(denoiser):
        denoiser.save_pretrained(Path(folder) / part, max_shard_size=_ONE_FILE)
        return
    name, where = _adapter_place(part, folder)
    adapter = {
        f"{name}_lora_layers": get_peft_model_state_dict(denoiser),
        f"{name}_lora_adapter_metadata": adapter_metadata(denoiser),
    }
    cls.save_lora_weights(where, **adapter)  # type: ignore[attr-defined]


def load_weights(part: str, denoiser: ModelMixin, folder: str) -> None:
    """Load what `save_weights` wrote; missing or unexpected tensors raise ValueError."""
    if is_adapted(denoiser):
        name, where = _adapter_place(part, folder)
        file = where / LORA_FILE
        state = load_file(existing(file))
        state = {k.removeprefix(f"{name}."): v for k, v in state.items()}
        same_shapes(state, get_peft_model_state_dict(denoiser), file)
        _same_alpha(name, denoiser, file)
        set_peft_model_state_dict(denoiser, state)
        return
    file = Path(folder) / part / "diffusion_pytorch_model.safetensors"
    state = load_file(existing(file))
    same_shapes(state, denoiser.state_dict(), file)
    denoiser.load_state_dict(state)


def load_adapter(pipe: Any, part: str, folder: str) -> None:
    """Load a saved adapter the way a user of plain diffusers does."""
    name, where = _adapter_place(part, folder)
    second = {} if name == part else {f"load_into_{part}": True}
    pipe.load_lora_weights(where, **second)


def _adapter_place(part: str, folder: str) -> tuple[str, Path]:
    """Return a part's name inside adapter files, and the folder that holds its file.

    diffusers gives both networks of Wan 2.2 the same name, so the second has a folder of its own.
    """
    name = part.removesuffix("_2")
    return name, Path(folder) if name == part else Path(folder) / part


def is_adapted(denoiser: ModelMixin) -> bool:
    """Return whether a LoRA adapter has been added."""
    return bool(denoiser._hf_peft_config_loaded)


def adapter_metadata(denoiser: ModelMixin) -> dict[str, Any]:
    """Return the adapter's configuration with JSON-compatible values."""
    metadata = denoiser.peft_config["default"].to_dict()
    return json.loads(json.dumps(metadata, default=sorted))


def existing(file: Path) -> Path:
    """Return the file if it exists, otherwise raise ValueError."""
    if not file.is_file():
        raise ValueError(f"{file} does not exist: not a checkpoint of this kind of training")
    return file


def same_shapes(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], file: Path) -> None:
    """Raise ValueError unless both have the same names and shapes."""
    wrong = got.keys() ^ wanted.keys()
    wrong |= {k for k in got.keys() & wanted.keys() if got[k].shape != wanted[k].shape}
    if wrong:
        raise ValueError(
            f"{file} belongs to another model or adapter: "
            f"{len(wrong)} of {len(wanted)} tensors differ,\n"
            f"for example {sorted(wrong)[0]}"
        )


def _same_alpha(part: str, denoiser: ModelMixin, file: Path) -> None:
    """Raise ValueError where a saved adapter was trained with another alpha.

    Tensors of equal shape do not tell how strongly they act; alpha is only in the metadata.
    """
    with safe_open(file, "pt") as opened:
        saved = json.loads((opened.metadata() or {}).get("lora_adapter_metadata", "{}"))
    alpha = denoiser.peft_config["default"].lora_alpha
    if (trained := saved.get(f"{part}.lora_alpha", alpha)) != alpha:
        raise ValueError(f"{file} was trained with lora.alpha {trained}, not {alpha}")
