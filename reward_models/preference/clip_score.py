"""Implements CLIPScore: cosine similarity of image and prompt under a CLIP model.

Source: Hessel et al. 2021, arXiv:2104.08718v3, Eq. (1), without its factor 2.5 and its clip at 0.
"""

from jaxtyping import Float
from torch import Tensor

from flowalign.types import MediaBatch, PositiveInt, RewardSpec
from reward_models.backbones.checkpoints import fingerprint_of
from reward_models.backbones.clip_towers import (
    Towers,
    prompt_similarity,
    read_hugging_face,
    read_open_clip,
)
from reward_models.backbones.network_reward import NetworkReward


class CLIPScore(NetworkReward):
    """Scores the cosine similarity in [-1, 1]; a video scores the mean over its frames.

    `model` is an architecture of open_clip, or a JSON file of sizes in open_clip's format, and
    `pretrained` one of its tags, or a checkpoint file. Without `pretrained`, `model` is a Hugging
    Face folder or hub repository of a CLIP or SigLIP model.
    """

    network: Towers

    def __init__(
        self,
        model: str = "ViT-L-14",
        pretrained: str | None = "openai",
        device: str = "auto",
        batch_size: PositiveInt = 32,
        offload: bool = False,
    ):
        spec = RewardSpec(
            name="clip_score",
            dims=("clip_score",),
            modality="any",
            scale=(-1.0, 1.0),
            licence="MIT",
            differentiable=True,
            needs=("prompt",),
            version=f"{fingerprint_of(model)} {fingerprint_of(pretrained)}",
        )
        super().__init__(spec, device, batch_size, offload)
        self.model, self.pretrained = model, pretrained

    def read(self) -> Towers:
        """Read both towers."""
        if self.pretrained is None:
            return read_hugging_face(self.model)
        return read_open_clip(self.model, self.pretrained)

    def rate(self, batch: MediaBatch) -> Float[Tensor, "n 1"]:
        """Return cos(image, text), averaged over frames."""
        return prompt_similarity(self.network, batch, self.batch_size)[:, None]
