"""Implements the base class of rewards that compare image features of any encoder."""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from flowalign.types import PositiveInt, RewardSpec
from reward_models.backbones.backbones import EfficientNet, Encoder
from reward_models.backbones.network_reward import NetworkReward


class EncoderReward(NetworkReward):
    """Base of rewards that compare the features of an encoder in `rate`.

    The encoder, by default an EfficientNet, is part of the version, because scores of different
    encoders are not comparable.
    """

    def __init__(
        self,
        spec: RewardSpec,
        encoder: Encoder | None,
        device: str,
        batch_size: PositiveInt,
        offload: bool,
    ):
        self.encoder = EfficientNet() if encoder is None else encoder
        version = f"{type(self.encoder).__name__} {self.encoder.version}"
        super().__init__(replace(spec, version=version), device, batch_size, offload)

    def read(self) -> nn.Module:
        """Read the encoder's weights."""
        self.encoder.read()
        return self.encoder.module

    def features(self, pictures: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n D"]:
        """Embed images in [0, 1], with a gradient to images that require one."""
        return self.encoder.embed_images(pictures.to(self.device, torch.float32)).float()
