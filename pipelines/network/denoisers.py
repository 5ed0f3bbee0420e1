"""Groups the denoisers of a pipeline with the settings of their weights.

Frozen weights can stay in main memory, with diffusers' group offloading.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from flowalign.types import Attention, Offload, Reduced, Setup
from pipelines.network.cuda_graphs import GraphedForward
from pipelines.network.lora_layers import restore_adapters, skip_input_casts, speed_up_adapters
from pipelines.network.quantization import PACKAGES, build_quantizer, cast_layerwise
from pipelines.network.speed import recompute_blocks, set_attention, speed_up
from pipelines.network.weights import (
    DTYPES,
    Lora,
    Precision,
    load_weights,
    prepare_training,
    save_weights,
)
from pipelines.parts.folder import Folder
from pipelines.parts.libraries import find_class, peft

_NAMES = "norm_q", "norm_k", "norm_added_q", "norm_added_k"
"""Attributes of attention layers of diffusers with the norms of queries and keys."""


_INPUTS = "hidden_states", "encoder_hidden_states"
"""First arguments of the attention layers of diffusers."""


def keep_dtype(network: nn.Module) -> None:
    """Let the norms of queries and keys return the dtype that they are given, and cast inputs once.

    CUDA autocast computes `nn.LayerNorm`, and from torch 2.12 `nn.RMSNorm`, in float32; a norm of
    diffusers with float32 weights returns float32 on every device. Autocast then converts the
    operands of attention once more, but kernels such as flash attention refuse mixed dtypes, and so
    does the backward pass where diffusers recomputes attention outside of autocast.
    """
    for norm in _norms(network):
        norm.register_forward_hook(_cast_output)
    for attention in _attentions(network):
        attention.register_forward_pre_hook(_cast_inputs, with_kwargs=True)


def release(network: nn.Module) -> None:
    """Remove the changes that prepared a network for training, except its adapter."""
    changed = [one._forward_hooks for one in _norms(network)]
    changed += [one._forward_pre_hooks for one in _attentions(network)]
    for hooks in changed:
        for key in [key for key, hook in hooks.items() if hook in (_cast_output, _cast_inputs)]:
            del hooks[key]
    restore_adapters(network)
    vars(network).pop("forward", None)
    for module in network.modules():
        module._compiled_call_impl = None


def _norms(network: nn.Module) -> Iterator[nn.Module]:
    for module in network.modules():
        for name in _NAMES:
            if isinstance(norm := getattr(module, name, None), nn.Module):
                yield norm


def _cast_output(norm: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:  # noqa: ARG001
    return output.to(args[0].dtype)


def _attentions(network: nn.Module) -> Iterator[nn.Module]:
    return (one for one in network.modules() if hasattr(one, "processor") and hasattr(one, "to_q"))


def _cast_inputs(
    attention: nn.Module,  # noqa: ARG001
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Cast the inputs of an attention once, where each of its linear layers would cast them.

    CUDA autocast computes the norm before it in float32. With gradient each layer casts, so that
    the gradients to the input are summed in float32.
    """
    if torch.is_grad_enabled():
        return None
    first = [_cast(one) for one in args[:2]]
    named = {name: _cast(one) if name in _INPUTS else one for name, one in kwargs.items()}
    return (*first, *args[2:]), named


def _cast(value: Any) -> Any:
    """Return a float32 tensor as autocast converts it for a product, and other values unchanged."""
    wide = isinstance(value, Tensor) and value.dtype == torch.float32
    if not wide or value.is_meta or not torch.is_autocast_enabled(value.device.type):
        return value
    return value.to(torch.get_autocast_dtype(value.device.type))


def place(network: Any, device: torch.device, offload: Offload) -> None:
    """Move a network to its device; with offloading each layer moves only while it is evaluated."""
    if offload == "none":
        network.to(device)
        return
    network.enable_group_offload(device, offload_type="leaf_level")
    for module in network.modules():
        if "_diffusers_hook" in vars(module):
            hook = module._diffusers_hook.get_hook("group_offloading")
            if group := hook and hook.group:
                group.onload_, group.offload_ = _lend(group.modules or [module], device)


def _lend(layers: Sequence[nn.Module], device: torch.device) -> tuple[Callable[[], None], ...]:
    """Return functions that give layers copies of their weights on the device, and take them back.

    diffusers would move the weights themselves. The backward pass needs some of them, such as those
    of a norm of queries, and would find them in main memory. The graph keeps what it needs of
    copies.
    """
    kept: list[tuple[dict[str, Any], str, Tensor]] = []

    def give() -> None:
        if kept:  # an earlier evaluation stopped inside of the layers, as recomputations do
            return
        stores: list[Any] = [s for one in layers for s in (one._parameters, one._buffers)]
        items = ((store, *item) for store in stores for item in store.items())
        kept.extend(item for item in items if item[2] is not None)
        for tensors, name, one in kept:
            copy = one.to(device)
            tensors[name] = nn.Parameter(copy, False) if isinstance(one, nn.Parameter) else copy

    def take_back() -> None:
        while kept:
            tensors, name, one = kept.pop()
            tensors[name] = one

    return give, take_back


def place_adapter(network: Any, device: torch.device) -> None:
    """Move only the adapter of a network to a device."""
    for layer in network.modules():
        if isinstance(layer, peft.tuners.lora.LoraLayer):
            for name in layer.adapter_layer_names:
                for parameter in getattr(layer, name).parameters():
                    parameter.data = parameter.data.to(device)


@dataclass(kw_only=True)
class Denoisers:
    """One or several denoisers of a pipeline. Separate functions implement their capabilities."""

    folder: Folder
    kind: str
    """Name of the denoiser's class, see `find_class`."""
    owner: str
    """Class name of the policy, for error messages."""
    lora: Lora | None
    precision: Precision
    gradient_checkpointing: bool
    checkpointing: str
    """Key of a run file that enables gradient checkpointing."""
    name: str = "transformer"
    """Name of the denoiser component, or of the first of two."""
    family_layers: Collection[str] = ()
    """Names of the layers that the family adapts by default, of which a network may lack some."""
    latents_argument: str = "hidden_states"
    """Name of the argument of the denoiser's `forward` that takes the noisy latents."""
    trained: tuple[str, ...] = ()
    """Names of the trained components; by default the denoiser."""
    assemble: Callable[[Mapping[str, Any]], Any] | None = None
    """Joins the denoisers among components into one module; None if there is only one denoiser."""
    computes_at_load: bool = False
    """Whether `load` evaluates the network, so that encoders and complete weights must be loaded.
    """
    setup: Setup = field(default_factory=Setup)
    rows: int = 1
    loads_to_cpu: bool = False
    empty: nn.Module | None = None
    pipe: Any = None
    """Loaded pipeline."""

    def __post_init__(self) -> None:
        """Train the denoiser unless other components are named."""
        self.trained = self.trained or (self.name,)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of frozen weights."""
        return DTYPES[self.precision]

    @property
    def names(self) -> list[str]:
        """Return the names of all denoisers, including frozen ones."""
        return self.folder.names(self.name)

    @property
    def names_in_main_memory(self) -> list[str]:
        """Return the names of denoisers that are not moved as a whole to the device."""
        if self.setup.offload != "none":
            return self.names
        return [name for name in self.names if self.loads_to_cpu and name in self.trained]

    @property
    def components(self) -> dict[str, Any]:
        """Return the components of the loaded pipeline."""
        return self.pipe.components

    def quantizers(self, *names: str) -> dict[str, Any]:
        """Return the quantization configs of the named components, by default of all."""
        setup, components = self.setup.quantization, self.folder.components()
        kinds = {self.name: setup.denoiser, "text_encoder": setup.text_encoders}
        return {
            name: build_quantizer(kind, components[name][0], self.dtype)
            for prefix, kind in kinds.items()
            if kind in PACKAGES
            for name in self.folder.names(prefix)
            if name in names or not names
        }

    def on_meta(self, name: str | None = None) -> Any:
        """Build a denoiser from its config. Call it inside `torch.device("meta")`."""
        return find_class(self.kind).from_config(self.folder.config(name or self.name))

    def place(self, device: torch.device) -> None:
        """Move the denoisers to a device, except those that are sharded from main memory."""
        for name in self.names:
            if not (self.loads_to_cpu and name in self.trained):
                place(self.components[name], device, self.setup.offload)

    def prepare(self) -> Any:
        """Prepare the loaded denoisers for training, and return them as one module."""
        for name in self.trained:
            denoiser = self.components[name]
            prepare_training(denoiser, self.lora)
            place_adapter(denoiser, denoiser.device)
            if self.lora and self.setup.quantization.denoiser == "none":
                self._speed_up_adapter(denoiser)
            if self.gradient_checkpointing:
                recompute_blocks(denoiser, self.setup.speed.kept_blocks or 0.0)
        for name in self.names:
            keep_dtype(self.components[name])
            self.cast_layerwise(self.components[name])
        for name in self.trained:
            speed_up(self.components[name], self.setup.speed, sharded=self.loads_to_cpu)
            if self.setup.speed.graphs:
                self.components[name].forward = GraphedForward(self.components[name])
        return self.join({})

    def _speed_up_adapter(self, denoiser: Any) -> None:
        if self.setup.speed.compile:
            skip_input_casts(denoiser)
        else:  # sharding and offloading replace parameters in each evaluation
            speed_up_adapters(denoiser, not self.loads_to_cpu and self.setup.offload == "none")

    def set_attention(self, name: Attention) -> None:
        for network in (*(self.components[trained] for trained in self.trained), self.empty):
            if network is not None:
                set_attention(name, network)
        self.setup = replace(self.setup, speed=replace(self.setup.speed, attention=name))

    def cast_layerwise(self, denoiser: Any) -> None:
        """Store a denoiser's layers and adapter in float8 if the setup asks for it."""
        cast_layerwise(denoiser, self.setup.quantization.denoiser, self.dtype)

    def join(self, replacements: Mapping[str, Any]) -> Any:
        """Return the denoisers as one module, with `replacements` for some of them."""
        components = {**self.components, **replacements}
        return self.assemble(components) if self.assemble else components[self.name]

    def evaluate(self, denoiser: Any, x: Tensor, **inputs: Any) -> tuple[Any, ...]:
        """Evaluate a denoiser in the current precision, and return all its outputs.

        The outputs are tensors, except that Z-Image's denoiser returns a list of tensors.
        """
        precision = current_precision(self.precision)
        dtype = DTYPES[precision]
        # Latents come first, because the costs count the rows of the first argument with rows.
        given = {self.latents_argument: x.to(dtype), **inputs}
        with torch.autocast(x.device.type, dtype, enabled=precision != "fp32"):
            return denoiser(**given, return_dict=False)

    def save(self, folder: str) -> None:
        """Write the trained weights in the format that diffusers loads."""
        for name in self.trained:
            save_weights(name, self.components[name], folder)

    def restore(self, folder: str) -> None:
        """Load the weights that `save` wrote."""
        for name in self.trained:
            load_weights(name, self.components[name], folder)


_REDUCED: ContextVar[Reduced | None] = ContextVar("reduced", default=None)
"""Precision of velocities if it is below the policy's; copies of the policy also use it."""


def current_precision(precision: str) -> str:
    """Return the precision of velocities now, for a policy with this precision."""
    return _REDUCED.get() or precision


@contextmanager
def reduce_precision(precision: Reduced) -> Iterator[None]:
    """Compute the velocities of all policies in a lower precision inside this context."""
    token = _REDUCED.set(precision)
    try:
        yield
    finally:
        _REDUCED.reset(token)
