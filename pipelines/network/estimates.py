"""Estimates memory and floating-point operations of networks from configs, on the meta device.

A multiplication with an addition counts as two operations, as in torch's `FlopCounterMode`.
Elementwise work is left out, and so are the layers of sound, which see few tokens.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from flowalign.types import Saving
from pipelines.network.denoisers import Denoisers
from pipelines.network.quantization import recast_bytes, stored_bytes
from pipelines.network.weights import count_gathered, count_trained
from pipelines.parts.libraries import diffusers, flop_counter
from pipelines.parts.memory import activations, block_inputs, kept_activations

_PER_SAMPLE = re.compile(
    r"norm|mod|time|pooled|guidance|adaln|scale_shift|temb|\bt_embedder", re.IGNORECASE
)
"""Layers with one row per sample: modulations, and embeddings of numbers."""
_TEXT = re.compile(r"add_|context|txt|text|caption|cap_embedder|encoder")
"""Layers of text tokens, and blocks that see only text."""
_IMAGE = re.compile(r"noise_refiner")
"""Blocks that see only image tokens."""
_SOUND = re.compile(r"^audio|\.audio_(?!to_video)|video_to_audio")
_QUERIES = re.compile(r"(to_q|to_qkv\w*|(?<!add_)q_proj)(\.base_layer)?$")
_CROSS = re.compile(r"attn2\.(to_k|to_v)\b")

Layers = Mapping[str, Any]


def evaluation_flops(denoiser: nn.Module, latent_shape: Any, num_tokens: int, num_text: int) -> int:
    """Return the operations of one evaluation of one sample.

    `num_tokens` counts the tokens of self-attention. They include the `num_text` text tokens unless
    the blocks attend to the text separately. UNets run on the meta device.
    """
    if isinstance(denoiser, diffusers.UNet2DConditionModel):
        return _trace_unet(denoiser, latent_shape, num_text)
    blocks: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for name, layer in denoiser.named_modules():
        if isinstance(layer, nn.Linear | _ConvNd) and not _SOUND.search(name):
            found = re.match(r"(?:[a-z_]+\.)*?[a-z_]+\.\d+(?=\.)", name)
            blocks[found[0] if found else ""][name] = layer
    crosses = any(_crosses(block, layers) for block, layers in blocks.items())
    images = num_tokens if crosses else num_tokens - num_text
    total = 0
    for block, layers in blocks.items():
        whole = num_text if _TEXT.search(block) else num_tokens
        whole = images if _IMAGE.search(block) or not block else whole
        split = any(_TEXT.search(name[len(block) :]) for name in layers)
        per_stream = images if split else whole
        for name, layer in layers.items():
            cross = crosses and _CROSS.search(name)
            rows = num_text if cross else _rows(name[len(block) :], per_stream, num_text)
            total += 2 * rows * layer.weight.numel()
        total += _attention(denoiser, layers, whole, images, num_text if crosses else images)
    return total


def _crosses(block: str, layers: Layers) -> bool:
    """Return whether a block attends to the text separately."""
    joint = any(".attn.add_k_proj" in name for name in layers)
    return bool(block) and not joint and any(".attn2.to_k" in name for name in layers)


def _rows(inner: str, tokens: int, num_text: int) -> int:
    """Return the number of rows of a sample that a layer sees, from its name in the block."""
    if _PER_SAMPLE.search(inner):
        return 1
    return num_text if _TEXT.search(inner) else tokens


def _attention(denoiser: Any, layers: Layers, tokens: int, images: int, second: int) -> int:
    """Return the operations of the two matrix products of each attention in a block.

    A second attention, `attn2`, has queries from `images` tokens and keys from `second` tokens.
    """
    total = 0
    for name, layer in layers.items():
        if not (found := _QUERIES.search(name)):
            continue
        width = layer.in_features
        attention = denoiser.get_submodule(name[: found.start() - 1])
        if "LinearAttn" in type(getattr(attention, "processor", None)).__name__:
            total += 4 * tokens * width * (width // attention.heads + 1)
        elif ".attn2." in name:
            total += 4 * images * second * width
        else:
            total += 4 * tokens * tokens * width
    return total


def _trace_unet(unet: Any, latent_shape: Any, num_text: int) -> int:
    """Count the operations of a UNet by running it on the meta device."""
    config, meta = unet.config, torch.device("meta")
    added = None
    if config.addition_embed_type == "text_time":
        size = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        added = {
            "text_embeds": torch.empty(1, size, device=meta),
            "time_ids": torch.empty(1, 6, device=meta),
        }
    x = torch.empty(1, *latent_shape, device=meta)
    text = torch.empty(1, num_text, config.cross_attention_dim, device=meta)
    with torch.no_grad(), flop_counter.FlopCounterMode(display=False) as counted:
        unet(x, torch.empty(1, device=meta), text, added_cond_kwargs=added)
    return counted.get_total_flops()


_WITH_MASKS = ("HunyuanVideo15Transformer3DModel",)
"""Networks whose layers make a boolean mask of all pairs of tokens."""


def plan_network(network: Denoisers) -> tuple[Any, dict[str, Any]]:
    """Return the denoiser on the meta device, without adapter, and fields of its `ModelPlan`."""
    dtype, kind = network.dtype, network.setup.quantization.denoiser
    recomputed = network.gradient_checkpointing
    with torch.device("meta"):
        denoiser = network.on_meta()
        total = sum(p.numel() for p in denoiser.parameters())
        gathered = count_gathered(denoiser)
        sizes = {one: stored_bytes(denoiser, one, dtype) for one in ("none", "int8", "nf4")}
        recast = recast_bytes(denoiser, kind, dtype, recomputed)
        least = recast_bytes(denoiser, kind, dtype, recomputed=True)
        stored = sizes[kind] if kind in sizes else stored_bytes(denoiser, kind, dtype)
    smaller = {one: stored - sizes[one] for one in ("int8", "nf4") if network.lora}
    savings = [
        Saving("weights", f"quantization.denoiser: {one}", saved)
        for one, saved in smaller.items()
        if saved > stored / 10
    ]
    if recast > least:
        savings.append(Saving("recast weights", f"{network.checkpointing}: true", recast - least))
    return denoiser, {
        "parameters": total,
        "trainable": count_trained(denoiser, network.lora, network.family_layers),
        "bytes_per_parameter": stored / total,
        "gathered_parameters": gathered,
        "recomputes": recomputed,
        "recast_bytes": recast,
        "savings": savings,
    }


def plan_activations(
    network: Denoisers, config: Mapping[str, Any], num_tokens: int
) -> tuple[dict[str, int], list[Saving]]:
    """Return fields of the `ModelPlan`, and the possible saving by recomputing activations.

    `kept_bytes` is an upper bound for UNets, which also recompute layers outside of the blocks.
    """
    size = network.dtype.itemsize
    whole, least = (
        size * activations(config, num_tokens, recomputed)
        + mask_bytes(network, config, num_tokens, recomputed)
        for recomputed in (False, True)
    )
    if network.gradient_checkpointing:
        kept = size * kept_activations(config, num_tokens)
        masks = mask_bytes(network, config, num_tokens, recomputed=False)
        inputs = size * block_inputs(config, num_tokens)
        return {"activation_bytes": least, "kept_bytes": kept + masks, "input_bytes": inputs}, []
    saving = Saving("activations", f"{network.checkpointing}: true", whole - least)
    return {"activation_bytes": whole}, [saving] if whole > least else []


def mask_bytes(
    network: Denoisers, config: Mapping[str, Any], num_tokens: int, recomputed: bool
) -> int:
    """Return the bytes of boolean masks of all pairs of tokens, and of what torch makes of them.

    One layer holds two boolean masks, the additive mask, and the copy of it with aligned rows. Each
    layer keeps the copy for the backward pass, and with recomputation (`recomputed`) only one does.
    """
    if network.kind not in _WITH_MASKS:
        return 0
    kept, size = 1 if recomputed else config["num_layers"], network.dtype.itemsize
    return num_tokens**2 * (2 + size + kept * size)


def kept_per_token(denoiser: nn.Module, recomputed: bool) -> int:
    """Estimate the number of values per token that are kept for the backward pass.

    It is twice the number of inputs and outputs of the blocks' linear layers. With recomputation it
    is this number for the largest block, plus the input of each block.
    """
    blocks: dict[str, list[nn.Linear]] = {}
    for name, layer in denoiser.named_modules():
        found = re.match(r"\w+\.\d+\.(?!.*norm)", name)  # norms: modulations are per sample
        if found and isinstance(layer, nn.Linear):
            blocks.setdefault(".".join(name.split(".")[:2]), []).append(layer)
    kept = [2 * sum(one.in_features + one.out_features for one in some) for some in blocks.values()]
    width = sum(some[0].in_features for some in blocks.values())
    return max(kept, default=0) + width if recomputed else sum(kept)
