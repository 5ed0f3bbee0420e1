"""Implements Human Preference Score v2 and v2.1: a fine-tuned CLIP ViT-H-14.

Source: Wu et al. 2023, arXiv:2306.09341v2. Unlike for CLIP, images are resized by their longest
side and padded with black. Scores are comparable only for the same prompt and version.
"""

from dataclasses import replace
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from flowalign.types import MediaBatch, PositiveInt, RewardSpec
from reward_models.backbones.checkpoints import find_file, fingerprint_of
from reward_models.backbones.clip_towers import Towers, prompt_similarity, read_open_clip
from reward_models.backbones.network_reward import NetworkReward

FILES = {"v2": "HPS_v2_compressed.pt", "v2.1": "HPS_v2.1_compressed.pt"}


class HPSv2(NetworkReward):
    """Scores cos(image, text), usually 0.2 to 0.35 (papers report it times 100).

    A video scores the mean over its frames. `weights` is a checkpoint file, or a folder or hub
    repository that has the file of this `version`; `model` is an architecture of open_clip, or a
    JSON file of sizes.
    """

    network: Towers

    def __init__(
        self,
        version: Literal["v2", "v2.1"] = "v2.1",
        weights: str = "xswu/HPSv2",
        model: str = "ViT-H-14",
        device: str = "auto",
        batch_size: PositiveInt = 32,
        offload: bool = False,
    ):
        if version not in FILES:
            raise ValueError(f"HPS version {version!r}; expected one of {list(FILES)}")
        name = f"hps{version}".replace(".", "_")
        spec = RewardSpec(
            name=name,
            dims=(name,),
            modality="any",
            scale=(-1.0, 1.0),
            licence="Apache-2.0",
            differentiable=True,
            needs=("prompt",),
            version=f"{fingerprint_of(weights)} {fingerprint_of(model)}",
        )
        super().__init__(spec, device, batch_size, offload)
        self.version, self.weights, self.model = version, weights, model

    def read(self) -> Towers:
        """Read both towers and set HPSv2's preprocessing."""
        towers = read_open_clip(self.model, str(find_file(self.weights, FILES[self.version])))
        towers.preprocessing = replace(towers.preprocessing, resize="longest")
        return towers

    def rate(self, batch: MediaBatch) -> Float[Tensor, "n 1"]:
        """Return cos(image, text), averaged over frames."""
        return prompt_similarity(self.network, batch, self.batch_size)[:, None]
