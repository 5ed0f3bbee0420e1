"""Implements backbones of trained rewards: an encoder, frozen or with LoRA, pooled over frames."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from flowalign.functional.rating import Features
from flowalign.types import Backbone, MediaBatch, PositiveInt, require_ranges
from reward_models.backbones.encoders import Encoder
from reward_models.backbones.libraries import peft

Part = Literal["image", "text", "product", "source"]
"""Parts of a sample that a head may see."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters in the encoder, trained together with the head."""

    rank: PositiveInt = 8
    alpha: PositiveInt = 16
    targets: Sequence[str] | None = None
    """Suffixes of module names; null adapts every linear layer that is called through its forward.
    """

    def __post_init__(self) -> None:
        """Raise ValueError for adapters that change nothing."""
        require_ranges(self, "lora")


class PooledFrames(Backbone):
    """Encodes frames one by one, pools them over time and joins them with the prompt's embedding.

    For longer videos `num_frames` evenly spaced frames are used. `over_frames` lists the pooling
    statistics, which are concatenated. `joint` lists the inputs of the head: the pooled image, the
    prompt, their elementwise product (its sum is the cosine similarity), and the source image of an
    edit. `at_once` frames are encoded together.
    """

    def __init__(
        self,
        encoder: Encoder,
        joint: Sequence[Part] = ("image", "text", "product"),
        over_frames: Sequence[Literal["mean", "std", "max"]] = ("mean",),
        num_frames: PositiveInt = 8,
        at_once: PositiveInt = 64,
        lora: Lora | None = None,
    ):
        self.reads_prompts, self.reads_references = encoder.reads_prompts, "source" in joint
        if not joint or not over_frames:
            raise ValueError(f"joint {[*joint]}, over_frames {[*over_frames]}: none may be empty")
        if not self.reads_prompts and not set(joint) <= {"image", "source"}:
            raise ValueError(
                f"{type(encoder).__name__} reads no prompts; its joint must be [image], "
                f"with or without source, not {list(joint)}"
            )
        self.encoder, self.joint, self.over_frames = encoder, joint, over_frames
        self.num_frames = self.most = num_frames
        self.at_once, self.lora = at_once, lora

    def load(self) -> None:
        """Read the encoder; adapters are initialised from torch's random state."""
        self.encoder.read()
        self.network = self.encoder.module.eval().requires_grad_(False)
        self.fingerprint = self._identity()
        if self.lora:
            _adapt(self.network, self.lora)

    def embed(self, batch: MediaBatch) -> Features:
        """Compute the features of every sample; each distinct prompt is encoded once."""
        device = next(self.network.parameters()).device
        frames = batch.media[:, _even_frames(batch.media.shape[1], self.most)]
        flat = frames.flatten(0, 1).to(device, torch.float32)
        encoded = torch.cat([self.encoder.embed_images(part) for part in flat.split(self.at_once)])
        image = self._pool(encoded.unflatten(0, frames.shape[:2]))
        distinct = list(dict.fromkeys(batch.prompts))
        text = self.encoder.embed_prompts(distinct).to(device)
        text = text[[distinct.index(p) for p in batch.prompts]]
        parts = {"image": image, "text": text}
        if self.reads_references:
            parts["source"] = self._pool(self._sources(batch)[:, None])
        if "product" in self.joint:
            parts["product"] = _product(image, text)
        return Features(torch.cat([parts[name] for name in self.joint], 1), text)

    def _sources(self, batch: MediaBatch) -> Float[Tensor, "n D"]:
        """Encode the first reference of each sample one by one, because sizes may differ."""
        device = next(self.network.parameters()).device
        images = [some[0][None].to(device, torch.float32) for some in batch.references]
        return torch.cat([self.encoder.embed_images(image) for image in images])

    def _pool(self, encoded: Float[Tensor, "n F D"]) -> Float[Tensor, "n D2"]:
        pools = {
            "mean": lambda: encoded.mean(1),
            "std": lambda: (encoded.var(1, correction=0) + 1e-12).sqrt(),  # finite gradient at 0
            "max": lambda: encoded.amax(1),
        }
        return torch.cat([pools[name]() for name in self.over_frames], 1)

    def _identity(self) -> str:
        digest = hashlib.sha256()
        settings = [
            type(self.encoder).__qualname__,
            self.encoder.settings,
            list(self.joint),
            list(self.over_frames),
            self.num_frames,
            asdict(self.lora) if self.lora else None,
        ]
        digest.update(json.dumps(settings).encode())
        for name, tensor in sorted(self.network.state_dict().items()):
            digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
            digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())
        return digest.hexdigest()[:16]


def _product(image: Float[Tensor, "n D"], text: Float[Tensor, "n E"]) -> Float[Tensor, "n D"]:
    """Multiply every pooling statistic of the image by the embedding of the prompt."""
    if image.shape[1] % text.shape[1]:
        raise ValueError(
            f"product needs embeddings of one size; images have {image.shape[1]}, "
            f"prompts {text.shape[1]}"
        )
    return image * text.repeat(1, image.shape[1] // text.shape[1])


def _even_frames(have: int, want: int) -> list[int]:
    """Return at most `want` evenly spaced frame indices, first and last included."""
    if have <= want:
        return list(range(have))
    return [round(i * (have - 1) / (want - 1)) for i in range(want)] if want > 1 else [0]


def _adapt(network: nn.Module, lora: Lora) -> None:
    """Insert adapters, and freeze all other parameters."""
    found = _linear_layers(network)
    if lora.targets is not None:
        found = [name for name in found if name.endswith(tuple(lora.targets))]
    if not found:
        raise ValueError(
            f"lora.targets {lora.targets} match no linear layer; the network has "
            f"{', '.join(_linear_layers(network)[:6]) or 'none'}"
        )
    config = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=found)
    peft.inject_adapter_in_model(config, network)


def _linear_layers(network: nn.Module) -> list[str]:
    """List the linear layers, except those with weights that an attention module reads directly."""
    owned = [n for n, m in network.named_modules() if isinstance(m, nn.MultiheadAttention)]
    return [
        name
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and not any(name.startswith(f"{o}.") for o in owned)
    ]
