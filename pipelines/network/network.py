"""Implements the operations of training runs on a pipeline's denoisers.

Settings, and combinations of settings, that a network does not support are rejected.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from math import gcd

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flowalign.types import (
    ExportDtype,
    ExportTarget,
    Policy,
    Quantization,
    Reduced,
    Setup,
    TrainedNetwork,
)
from pipelines.network.context import divide_context
from pipelines.network.cuda_graphs import check_graphs
from pipelines.network.denoisers import Denoisers, reduce_precision
from pipelines.network.export_formats import check_export, export
from pipelines.network.quantization import PACKAGES
from pipelines.network.speed import blocks_of, check_attention, usable_attention
from pipelines.network.weights import DTYPES
from pipelines.parts.folder import digest_files
from pipelines.parts.libraries import attention_dispatch

_CONTEXT_NETWORKS = {
    "WanTransformer3DModel": False,
    "FluxTransformer2DModel": True,
    "Flux2Transformer2DModel": True,
    "QwenImageTransformer2DModel": True,
}
"""Networks with divided evaluation tested against the whole network: velocities and gradients. True
if the tokens of prompts are divided as well."""
_CONTEXT_POLICIES = "Wan, FLUX.1, FLUX.2, Qwen-Image and their variants"
_CONTEXT_FAILURES = {
    "LTXVideoTransformer3DModel": "masks keep all heads in diffusers 0.42.1, which fails",
    "LTX2VideoTransformer3DModel": "positions keep all tokens in diffusers 0.42.1, which fails",
}
"""Networks with a plan that fails, and why."""
_WITHOUT_OFFLOAD = ("DiTTransformer2DModel", "HunyuanDiT2DModel")
"""Networks without group offloading in diffusers 0.42.1."""


def check_setup(
    network: Denoisers, setup: Setup, count_tokens: Callable[[], int], num_text: int
) -> None:
    """Check that the network supports the setup, from configs only.

    `num_text` is the number of tokens of a prompt.

    Raises:
        ValueError: A package or backend is missing, the network does not support a setting, or two
            settings exclude each other.
    """
    _check_exclusions(setup)
    _check_loaded(network, setup)
    _check_quantization(network, setup.quantization)
    if setup.speed.graphs:
        check_graphs(network.lora is not None)
    with torch.device("meta"):
        check_attention(setup.speed.attention, network.on_meta)
    _check_sharding(network, setup)
    _check_offload(network, setup)
    if setup.sharding.context_degree > 1:
        _check_context(network, setup, count_tokens, num_text)
    if setup.prompt_cache is not None and network.computes_at_load:
        raise ValueError(
            f"prompt_cache: {network.owner} needs the encoders while it loads, to record "
            "the calls of its pipeline; use the policy of the family, or leave it out"
        )


def _check_loaded(network: Denoisers, setup: Setup) -> None:
    """Raise ValueError for settings of reading weights, if a script has read them."""
    for name in ("quantization", "prompt_cache"):
        if network.folder.loaded and getattr(setup, name) != getattr(Setup(), name):
            raise ValueError(
                f"{name} applies while weights are read, but the pipeline is already loaded: "
                "leave it out, or train the folder of the pipeline with a run file"
            )


def _check_exclusions(setup: Setup) -> None:
    """Raise ValueError for pairs of settings that exclude each other."""
    degree, weights = setup.sharding.context_degree, setup.sharding.weights
    denoiser, offload = setup.quantization.denoiser, setup.offload
    set_to = {
        "context": f"sharding.context_degree {degree}" if degree > 1 else "",
        "quantization": f"quantization.denoiser {denoiser}" if denoiser != "none" else "",
        "sharding": f"sharding.weights {weights}" if weights != "replicated" else "",
        "compile": "speed.compile" if setup.speed.compile else "",
        "graphs": "speed.graphs" if setup.speed.graphs else "",
        "offload": f"offload {offload}" if offload != "none" else "",
        "kept": f"speed.kept_blocks {setup.speed.kept_blocks}" if setup.speed.kept_blocks else "",
    }
    for (one, other), reason in _EXCLUSIONS.items():
        if set_to[one] and set_to[other]:
            raise ValueError(
                f"{set_to[one]} and {set_to[other]} exclude each other, as {reason}; "
                "set one of them to its default"
            )


_UNTESTED = "they were not tested together"
_PLACES = "both change where or how layers keep their weights"
_KEPT = "kept blocks would also keep their weights on the device"
_EXCLUSIONS = {
    ("offload", "kept"): _KEPT,
    ("quantization", "kept"): _KEPT,
    ("compile", "graphs"): "compiled blocks have graphs of their own",
    ("graphs", "offload"): _PLACES,
    ("graphs", "sharding"): _PLACES,
    ("graphs", "quantization"): "layers that dequantize wait for the device",
    ("context", "graphs"): _UNTESTED,
    ("quantization", "sharding"): "quantized weights cannot be sharded",
    ("quantization", "compile"): "layers that dequantize break the graph",
    ("context", "compile"): _UNTESTED,
    ("context", "quantization"): _UNTESTED,
    ("context", "offload"): _UNTESTED,
    ("offload", "quantization"): _PLACES,
    ("offload", "compile"): _PLACES,
    ("offload", "sharding"): _PLACES,
}


def _check_quantization(network: Denoisers, quantization: Quantization) -> None:
    if quantization.denoiser != "none" and network.lora is None:
        raise ValueError(
            f"quantization.denoiser is {quantization.denoiser}, but policy.lora is null, and "
            "quantized weights are not trained: set policy.lora, or quantization.denoiser to none"
        )
    for setting, kind in vars(quantization).items():
        if (package := PACKAGES.get(kind)) and not find_spec(package):
            raise ValueError(
                f"quantization.{setting} {kind} needs {package}: "
                "pip install 'flowalign-diffusion[quantized]'"
            )


def _check_sharding(network: Denoisers, setup: Setup) -> None:
    if setup.sharding.weights == "replicated":
        return
    trained, precision = len(network.trained), network.precision
    if network.lora is None and (trained > 1 or precision == "fp16"):
        raise ValueError(
            "sharding.weights blocks without policy.lora trains one network in fp32 or bf16, not "
            f"{trained} in {precision}: set policy.lora"
        )
    if network.lora is None and setup.speed.compile:
        raise ValueError(
            "speed.compile and sharding.weights blocks need a LoRA, as the frozen copy of a whole "
            "network would share its compiled blocks: set policy.lora, or speed.compile to false"
        )
    if network.computes_at_load:
        raise ValueError(
            "sharding.weights blocks needs a policy that does not compute while it loads, but "
            f"{network.owner} replays its pipeline; use the policy of the family"
        )


def _check_offload(network: Denoisers, setup: Setup) -> None:
    if setup.offload == "none":
        return
    if network.lora is None:
        raise ValueError(
            "offload is layers, but policy.lora is null, and weights that are trained stay on "
            "the device: set policy.lora, or offload to none"
        )
    if not network.gradient_checkpointing:
        raise ValueError(
            f"offload is layers, but {network.checkpointing} is false, so the backward pass would "
            "keep every layer's weights on the device: set it to true"
        )
    if network.kind in _WITHOUT_OFFLOAD:
        raise ValueError(
            f"offload is layers, but {network.kind} of diffusers does not "
            "support it: set it to none"
        )


def _check_context(
    network: Denoisers, setup: Setup, count_tokens: Callable[[], int], num_text: int
) -> None:
    degree, attention = setup.sharding.context_degree, setup.speed.attention
    prefix, kind = f"sharding.context_degree is {degree}, but", network.kind
    if kind not in _CONTEXT_NETWORKS or network.computes_at_load:
        reason = _CONTEXT_FAILURES.get(kind, "has no plan in diffusers 0.42.1")
        reason = "is not tested with recorded pipelines" if network.computes_at_load else reason
        raise ValueError(
            f"{prefix} {network.owner} does not support it: {kind}: {reason}; allowed here: 1. "
            f"Supported by {_CONTEXT_POLICIES}"
        )
    tokens = count_tokens()
    known = attention_dispatch._AttentionBackendRegistry._supports_context_parallel
    if attention not in known:
        usable = ", ".join(sorted(known & {*usable_attention()}))
        raise ValueError(
            f"{prefix} speed.attention {attention!r} does not support it; allowed here: {usable}"
        )
    if network.lora is None:
        raise ValueError(f"{prefix} policy.lora is null; train a LoRA, or set the degree to 1")
    heads = network.folder.config(network.name)["num_attention_heads"]
    if heads % degree:
        raise ValueError(
            f"{prefix} it must also divide the {heads} heads of {network.folder.path}; "
            f"allowed here: {_divisors(heads, tokens)}"
        )
    if _CONTEXT_NETWORKS[kind] and num_text % degree:
        raise ValueError(
            f"{prefix} the {num_text} tokens of a prompt are not a multiple of it: set "
            f"policy.max_sequence_length to {num_text - num_text % degree}"
        )
    if tokens % degree:
        raise ValueError(
            f"{prefix} the {tokens} tokens of a clip are not a multiple of it; allowed here: "
            f"{_divisors(heads, tokens)}, or another height or width"
        )


def _divisors(*numbers: int) -> str:
    common = gcd(*numbers)
    return ", ".join(str(d) for d in range(1, common + 1) if common % d == 0)


class Network(Denoisers, TrainedNetwork):
    """Denoisers of a pipeline that can be sharded, divided, accelerated and exported."""

    def modules(self) -> Sequence[tuple[nn.Module, Sequence[nn.Module]]]:
        trained = [self.components[name] for name in self.trained]
        return [(denoiser, blocks_of(denoiser)) for denoiser in trained]

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        return blocks_of(module)

    def divide_context(self, mesh: DeviceMesh, meet: Callable[[str], None]) -> None:
        divide_context([self.components[name] for name in self.names], mesh, meet)

    def reduce_precision(self, precision: Reduced) -> AbstractContextManager[None]:
        return reduce_precision(precision)

    def digest_files(self) -> str:
        return "" if self.folder.loaded else digest_files(self.folder, self.names)

    @property
    def left_out(self) -> list[str]:
        return sorted(self.folder.components().keys() & self.folder.skipped.keys())

    def check_export(self, folder: str, target: ExportTarget) -> None:
        check_export(self, folder, target)

    def export(
        self, policy: Policy, out: str, target: ExportTarget, dtype: ExportDtype
    ) -> float | None:
        return export(self, policy, out, target, DTYPES[dtype])
