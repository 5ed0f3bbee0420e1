"""Record how much image tokens attend to the prompt, in the joint attention of a denoiser."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn


def prompt_attention(
    attention: nn.Module, image: Float[Tensor, "n p D"], prompt: Float[Tensor, "n t D"]
) -> Float[Tensor, "n p"]:
    """Return the share of each image token's attention that goes to the prompt, mean over heads.

    Fused kernels return no weights, so queries and keys are computed again, from the projections
    of diffusers' joint attention without rotary embeddings (SD3).
    """
    heads: Any = attention

    def split(x: Tensor, norm: str) -> Tensor:
        x = x.unflatten(2, (heads.heads, -1)).transpose(1, 2)
        scale = getattr(heads, norm, None)
        return x if scale is None else scale(x)

    query = split(heads.to_q(image), "norm_q")
    keys = [split(heads.to_k(image), "norm_k"), split(heads.add_k_proj(prompt), "norm_added_k")]
    logits = query @ torch.cat(keys, 2).transpose(2, 3) / query.shape[-1] ** 0.5
    return logits.float().softmax(3)[..., image.shape[1] :].sum(3).mean(1)


@contextmanager
def record_prompt_attention(denoiser: nn.Module) -> Iterator[list[Tensor]]:
    """Yield a list that collects `prompt_attention` of every joint attention, in order.

    Raises:
        ValueError: The denoiser has no joint attention without rotary embeddings.
    """
    layers = [layer for layer in denoiser.modules() if getattr(layer, "add_k_proj", None)]
    if not layers:
        raise ValueError(
            f"spatial credit from attention reads the joint attention of image and prompt, which "
            f"{type(denoiser).__name__} does not have: choose SD3, or RewardMap"
        )
    seen: list[Tensor] = []

    def keep(layer: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        image = given.get("hidden_states", args[0] if args else None)
        prompt = given.get("encoder_hidden_states")
        if given.get("image_rotary_emb") is not None or image is None or prompt is None:
            raise ValueError(
                "spatial credit from attention does not support rotary embeddings: choose SD3, "
                "or RewardMap"
            )
        with torch.no_grad():
            seen.append(prompt_attention(layer, image, prompt))

    handles = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
