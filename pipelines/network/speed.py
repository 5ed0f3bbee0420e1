"""Selects attention backends, and compiles or recomputes blocks of diffusers networks."""

import inspect
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flowalign.types import Speed
from flowalign.utils.files import read_json, write_text
from pipelines.parts.libraries import attention_dispatch

_WITHOUT_BACKWARD = "sage", "sage_hub"
"""Backends that compute no gradient. Source: attention_dispatch of diffusers 0.42.1."""
_OWN_KERNEL = ("QwenImage21Transformer2DModel",)
"""Networks that use a backend of their own whenever they see a whole sequence."""
_BOOLEAN_MASKS = (
    "HunyuanVideo15Transformer3DModel",
    "Krea2Transformer2DModel",
    "QwenImageTransformer2DModel",
    "ZImageTransformer2DModel",
)
"""Networks with boolean masks, which diffusers 0.42.1 adds as 0 and 1 with the backend xformers."""
_MASKED = (
    *_BOOLEAN_MASKS,
    "HunyuanVideoTransformer3DModel",
    "LTXVideoTransformer3DModel",
    "LTX2VideoTransformer3DModel",
)
"""Networks with masks, which flash attention and xformers refuse or misread."""
_REPEATS, _SECONDS = 3, 3.0
"""Timed passes of each attention backend, and seconds after which no further one is measured."""
MOST_GRAPHS = 64
"""Number of graphs of one class of blocks after which torch stops the run (torch's default: 8)."""


def check_attention(name: str, build: Callable[[], nn.Module]) -> None:
    """Raise ValueError if an attention backend cannot train a network.

    `build` makes the network, and is called only if needed.

    Raises:
        ValueError: The backend has no backward pass or its package is missing, or no layer of the
            network accepts a backend.
    """
    if name == "native":
        return
    asked = f"speed.attention is {name!r}, but"
    if name in _WITHOUT_BACKWARD:
        raise ValueError(f"{asked} it has no backward pass; allowed here: {_usable()}")
    if name != "auto" and (why := _missing(name)):
        raise ValueError(f"{asked} {why}\nallowed here: {_usable()}")
    network = build()
    kind = type(network).__name__
    if kind in _OWN_KERNEL or not list(_processors(network)):
        raise ValueError(f"{asked} diffusers' {kind} does not support it; allowed here: native")
    if name == "xformers" and kind in _BOOLEAN_MASKS:
        raise ValueError(
            f"{asked} diffusers adds the boolean mask of {kind} to its attention scores instead "
            "of masking them: choose native or another backend"
        )


def set_attention(name: str, network: nn.Module) -> None:
    """Set the attention backend of this network's layers only."""
    backend = attention_dispatch.AttentionBackendName(name)
    attention_dispatch._maybe_download_kernel_for_backend(backend)
    for processor in _processors(network):
        processor._attention_backend = backend


def fastest_attention(
    network: nn.Module, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Any:
    """Return the backend with the fastest forward and backward pass, native without a GPU.

    `shape` is the number of rows and of tokens. The choice is stored in the user's cache folder,
    for each card, version of torch, and shape.
    """
    if device.type != "cuda":
        return "native"
    modules: Iterator[Any] = network.modules()
    layer = next(one for one in modules if hasattr(one, "to_q") and hasattr(one, "heads"))
    masked = type(network).__name__ in _MASKED
    size = *shape, int(layer.heads), layer.to_q.out_features // int(layer.heads)
    card, place = torch.cuda.get_device_name(device), f"{size} {dtype} masked={masked}"
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    file, key = root / "flowalign/attention.json", f"{card}, torch {torch.__version__}, {place}"
    known = read_json(file) if file.exists() else {}
    if known.get(key) not in (usable := [*usable_attention()]):
        heads = [torch.randn(size, dtype=dtype, device=device) for _ in range(3)]
        names = [one for one in usable if not (masked and ("flash" in one or one == "xformers"))]
        seconds = _time_backends(names, [one.requires_grad_() for one in heads])
        known[key] = min(seconds, key=lambda name: seconds[name])
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(known, indent=1))
    return known[key]


def _time_backends(names: Sequence[str], heads: Sequence[Tensor]) -> dict[str, float]:
    """Return the seconds of a forward and backward pass by backend, without those that fail."""
    seconds, begin, (q, k, v) = dict[str, float](), time.perf_counter(), heads
    for name in names:
        backend, times = attention_dispatch.AttentionBackendName(name), list[float]()
        while len(times) <= _REPEATS and time.perf_counter() - begin < _SECONDS:
            torch.cuda.synchronize()
            start = time.perf_counter()
            try:
                out = attention_dispatch.dispatch_attention_fn(q, k, v, backend=backend)
                torch.autograd.grad(out.sum(), heads)
            except (RuntimeError, ValueError):  # no kernel for this card, dtype or head size
                break
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        if len(times) > 1:  # the first pass compiles or loads kernels
            seconds[name] = min(times[1:])
    return seconds or {"native": 0.0}


def blocks_of(network: Any) -> list[nn.Module]:
    """Return the repeated blocks of a network.

    They are found by the names that the network's class declares. Some classes declare none; then
    the longest list of modules is returned.
    """
    named = {*(network._no_split_modules or ()), *(network._repeated_blocks or ())}
    found = [block for block in network.modules() if type(block).__name__ in named]
    lists = [list(part) for part in network.modules() if isinstance(part, nn.ModuleList)]
    repeated = [block for part in lists for block in part if block in found]
    return repeated or max(lists, key=len, default=[])


def recompute_blocks(network: Any, kept: float) -> None:
    """Recompute activations in the backward pass, except those of an even share of the blocks.

    The state of random number generators is restored only if a layer draws numbers.
    """
    blocks = enumerate(blocks_of(network))
    keeping = {id(one) for i, one in blocks if int((i + 1) * kept) > int(i * kept)}
    draws = any(isinstance(one, nn.Dropout) and one.training and one.p for one in network.modules())

    def evaluate(module: Callable[..., Any], *args: Any) -> Any:
        if id(module) in keeping:
            return module(*args)
        return checkpoint(module, *args, use_reentrant=False, preserve_rng_state=draws)

    network.enable_gradient_checkpointing(evaluate)


def compile_blocks(network: Any, inside_hooks: bool = False) -> None:
    """Compile each repeated block. A graph break raises torch's error.

    All blocks of a class share one limit of graphs. Each kind of block needs several: with and
    without gradient, and with the adapter off. Hooks of a block stay outside of its graph with
    `inside_hooks`, as those of FSDP2 must; copies of such a network are wrong.
    """
    limit: dict[str, Any] = {"recompile_limit": MOST_GRAPHS}
    if "recompile_limit" not in inspect.signature(torch.compile).parameters:  # before torch 2.15
        torch._dynamo.config.recompile_limit = MOST_GRAPHS
        limit = {}
    for block in blocks_of(network):
        if inside_hooks:
            block.forward = torch.compile(block.forward, fullgraph=True, dynamic=True, **limit)
        else:
            block.compile(fullgraph=True, dynamic=True, **limit)


def speed_up(network: Any, speed: Speed, sharded: bool = False) -> None:
    """Apply the settings to a loaded network, before it is sharded."""
    if speed.attention not in ("auto", "native"):
        set_attention(speed.attention, network)
    if speed.compile:
        compile_blocks(network, inside_hooks=sharded)


def usable_attention() -> Iterator[str]:
    """Yield the backends that have a backward pass and installed packages."""
    for backend in attention_dispatch.AttentionBackendName:
        if backend.value not in _WITHOUT_BACKWARD and not _missing(backend.value):
            yield backend.value


def _usable() -> str:
    return ", ".join(usable_attention())


def _missing(name: str) -> str:
    """Return the reason why a backend cannot be used on this machine, or ""."""
    backend = attention_dispatch.AttentionBackendName(name)
    on_cpu = "native", "_native_math"  # on CPU flex has no backward pass
    if name not in on_cpu and not torch.cuda.is_available():
        return "torch sees no CUDA device"
    try:
        attention_dispatch._check_attention_backend_requirements(backend)
    except RuntimeError as error:
        extra = ": pip install 'flowalign-diffusion[xformers]'" if name == "xformers" else ""
        return f"{error}{extra}"
    return ""


def _processors(network: nn.Module) -> Iterator[Any]:
    """Yield the attention processors that dispatch to a backend."""
    for module in network.modules():
        processor = getattr(module, "processor", None)
        if hasattr(processor, "_attention_backend"):
            yield processor
