"""Prepares a denoiser, which may be sharded, and saves its weights as diffusers loads them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowalign.types import PositiveInt
from flowalign.utils.adapters import TRAINED, active_adapters
from pipelines.network.adapter_files import is_adapted, load_adapter, save_adapter
from pipelines.network.checkpoint_checks import check_complete, loading_context
from pipelines.network.speed import blocks_of
from pipelines.parts.folder import INDEX, Folder
from pipelines.parts.libraries import diffusers, fsdp, peft, state_dict, transformers
from pipelines.parts.tensors import (
    read_tensors,
    require_file,
    require_finite,
    require_same_shapes,
)


def count_gathered(network: Any) -> int:
    """Count the parameters of the largest block and of all layers outside the blocks."""
    blocks = blocks_of(network)  # those of a UNet lie in one another
    inside = {id(p) for block in blocks for p in block.parameters()}
    outside = sum(p.numel() for p in network.parameters() if id(p) not in inside)
    return outside + max((sum(p.numel() for p in one.parameters()) for one in blocks), default=0)


def gather_whole(network: Any) -> Any:
    """Return a network with all its weights: itself or, if it is sharded, a copy in main memory.

    All processes must call this for a sharded network. Only the first process gets the copy; the
    other processes get None.
    """
    module: nn.Module = network
    if not isinstance(module, fsdp.FSDPModule):
        return network
    options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = state_dict.get_model_state_dict(network, options=options)
    if not state:
        return None
    own = type(network).__bases__[1]  # FSDP2 makes a subclass of (FSDPModule, own)
    with torch.device("meta"):
        made = own.from_config(network.config)
    made.load_state_dict(state, assign=True)
    return made


def load_whole(network: Any, state: dict[str, Tensor]) -> None:
    """Load all weights of a network that may be sharded."""
    module: nn.Module = network
    if isinstance(module, fsdp.FSDPModule):
        options = state_dict.StateDictOptions(full_state_dict=True)
        state_dict.set_model_state_dict(network, dict(state), options=options)
    else:
        network.load_state_dict(state)


Precision = Literal["fp32", "bf16", "fp16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ONE_FILE = "10TB"


ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
"""Names of attention layers in most diffusers transformers.

Source: dreambooth scripts of diffusers for Qwen-Image, Z-Image and FLUX.2."""
_OF_TEXT = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
JOINT_ATTENTION = tuple(f"attn.{name}" for name in (*ATTENTION, *_OF_TEXT))
"""Attention layers of two-stream transformers. Source: Flow-GRPO's SD3 configuration."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapter on the denoiser."""

    rank: PositiveInt = 32
    alpha: PositiveInt = 64
    target_modules: tuple[str, ...] | None = None
    """Name suffixes of the adapted linear layers; null uses the layers of the model family."""

    def with_layers(self, default: "Lora") -> "Lora":
        """Return this adapter; if it names no layers, use the layers of `default`."""
        if self.target_modules is not None:
            return self
        return replace(self, target_modules=default.target_modules)


def load_pipeline(
    folder: Folder,
    dtype: torch.dtype,
    quantizers: Mapping[str, Any] | None = None,
    device: torch.device | None = None,
    in_main_memory: Sequence[str] = (),
    **components: Any,
) -> Any:
    """Load a pipeline with all components converted to one dtype.

    On a GPU as `device`, components are built on the meta device, and read tensor by tensor to the
    GPU, except those named `in_main_memory`, and all if some are quantized. Otherwise the whole
    pipeline is read to main memory.

    Layers that a model keeps in float32 stay in float32. Examples are Wan's time embedding and
    norms in diffusers, and T5's last projections in transformers if the rest is in float16. Given
    `components` are left unchanged, and components that the folder skips are not read. Components
    with a config in `quantizers` are quantized. The pipeline of a script is only frozen.

    Raises:
        ValueError: The hub cannot be reached, or a component cannot be loaded.
    """
    if folder.loaded:
        return _freeze(folder.loaded.pipe)
    settings: dict[str, Any] = {"dtype": dtype, **folder.skipped, **components}
    if quantizers:
        config = diffusers.PipelineQuantizationConfig(quant_mapping=dict(quantizers))
        settings["quantization_config"] = config
    if not Path(folder.path).exists():
        folder.file(INDEX)
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]), loading_context(folder, settings):
        if device and device.type not in ("cpu", "meta") and not quantizers:  # read to the device
            names = [name for name in in_main_memory if name not in settings]
            settings |= {name: folder.read(name, dtype=dtype) for name in names}
            settings["device_map"] = device.type
        pipe = folder.pipeline.from_pretrained(folder.path, **settings)  # some draw random weights
    for name, part in _modules(pipe, components):
        check_complete(folder.path, name, part)
        if name not in (quantizers or ()) and not _keeps_float32(part, dtype):
            torch.nn.Module.to(part, dtype)  # diffusers' own `to` would warn
    return _freeze(pipe, components)


def _modules(pipe: Any, without: Collection[str] = ()) -> list[tuple[str, torch.nn.Module]]:
    parts = [(name, part) for name, part in pipe.components.items() if name not in without]
    return [(name, part) for name, part in parts if isinstance(part, torch.nn.Module)]


def _freeze(pipe: Any, without: Collection[str] = ()) -> Any:
    """Freeze the components of a pipeline, except those named in `without`."""
    for _, part in _modules(pipe, without):
        part.eval().requires_grad_(False)
    return pipe


def _keeps_float32(part: torch.nn.Module, dtype: torch.dtype) -> bool:
    """Return whether `from_pretrained` keeps some layers of this model in float32."""
    if isinstance(part, transformers.PreTrainedModel):
        always, in_float16 = part._keep_in_fp32_modules_strict, part._keep_in_fp32_modules
        return bool(always or (dtype == torch.float16 and in_float16))
    return isinstance(part, diffusers.ModelMixin) and bool(part._keep_in_fp32_modules)


def float32_bytes(part: Any, dtype: torch.dtype) -> int:
    """Return the bytes that layers of a text encoder take in float32 beyond those in `dtype`.

    With float16 these are for example T5's last projections of each block.
    """
    names = {*(part._keep_in_fp32_modules_strict or ())}
    names |= {*(part._keep_in_fp32_modules or ())} if dtype == torch.float16 else set()
    kept = [p for name, p in part.named_parameters() if names & {*name.split(".")}]
    return (4 - dtype.itemsize) * sum(p.numel() for p in kept)


def prepare_training(denoiser: Any, lora: Lora | None) -> None:
    """Enable gradients, in float32, for the trained parameters only: the adapter or all."""
    if lora is None:
        denoiser.requires_grad_(True).float()
        return
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        init_lora_weights="gaussian",
        target_modules=list(lora.target_modules or JOINT_ATTENTION),
    )
    with torch.random.fork_rng(devices=[]):  # every rank and every run starts from the same adapter
        torch.random.default_generator.manual_seed(0)
        others = active_adapters(denoiser)
        denoiser.add_adapter(config, TRAINED)
    if others:  # adapters of a script keep acting, and are not trained
        denoiser.set_adapter([*others, TRAINED])
        for name, parameter in denoiser.named_parameters():
            parameter.requires_grad_(f".{TRAINED}." in name)
    for parameter in denoiser.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def count_trained(
    denoiser: torch.nn.Module, lora: Lora | None, family_layers: Collection[str] = ()
) -> int:
    """Count the parameters that `prepare_training` would train, without building the adapter.

    Raises:
        ValueError: No layer has one of the adapter's names, or one that is not of the family.
    """
    if lora is None:
        return sum(p.numel() for p in denoiser.parameters())
    targets = tuple(lora.target_modules or JOINT_ATTENTION)
    layers: dict[str, Any] = {
        f".{name}": module.weight
        for name, module in denoiser.named_modules()
        if hasattr(module, "weight")
    }
    absent = [t for t in targets if not any(name.endswith(f".{t}") for name in layers)]
    if len(absent) == len(targets) or {*absent} - {*family_layers}:
        raise ValueError(
            f"no layer of {type(denoiser).__name__} ends with {', '.join(absent)} of "
            "policy.lora.target_modules; leave it out to adapt the layers of the family"
        )
    endings = tuple(f".{target}" for target in targets)
    weights = [weight for name, weight in layers.items() if name.endswith(endings)]
    return lora.rank * sum(weight[0].numel() + len(weight) for weight in weights)


def save_weights(part: str, denoiser: Any, folder: str) -> None:
    """Save the adapter in the formats of diffusers, ComfyUI and PEFT, or the whole denoiser."""
    if is_adapted(denoiser):
        save_adapter(part, denoiser, folder)
    elif (one := gather_whole(denoiser)) is not None:
        one.save_pretrained(Path(folder) / part, max_shard_size=_ONE_FILE)


def load_weights(part: str, denoiser: Any, folder: str) -> None:
    """Load the weights that `save_weights` wrote.

    Raises:
        ValueError: Tensors are missing or unexpected.
    """
    if is_adapted(denoiser):
        load_adapter(part, denoiser, folder)
        return
    file = Path(folder) / part / "diffusion_pytorch_model.safetensors"
    state = read_tensors(require_file(file))
    require_same_shapes(state, denoiser.state_dict(), file)
    require_finite(state, file)
    load_whole(denoiser, state)
