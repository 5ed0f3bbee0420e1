"""Implements PickScore: a CLIP model trained on annotators' choices between two images.

Source: Kirstain et al. 2023, arXiv:2305.01569v2, section 3.
"""

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from flowalign.types import MediaBatch, PositiveInt, RewardSpec
from reward_models.backbones.checkpoints import fingerprint_of
from reward_models.backbones.clip_towers import Towers, prompt_similarity, read_hugging_face
from reward_models.backbones.network_reward import NetworkReward

DIVISORS = {"none": 1, "divided by 26": 26}


class PickScore(NetworkReward):
    """Scores exp(logit_scale) cos(image, text); a video scores the mean over its frames.

    The preference between images of one prompt is the softmax of their scores. Flow-GRPO divides
    scores by 26 to scale them to about [0, 1]; set `normalisation` to do the same. `model` and
    `processor` (tokenizer and preprocessing) are Hugging Face folders or hub repositories.
    """

    network: Towers

    def __init__(
        self,
        model: str = "yuvalkirstain/PickScore_v1",
        processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        normalisation: Literal["none", "divided by 26"] = "none",
        device: str = "auto",
        batch_size: PositiveInt = 32,
        offload: bool = False,
    ):
        if normalisation not in DIVISORS:
            raise ValueError(f"normalisation {normalisation!r}; expected one of {list(DIVISORS)}")
        self.divisor = DIVISORS[normalisation]
        spec = RewardSpec(
            name="pickscore",
            dims=("pickscore",),
            modality="any",
            scale=(-100 / self.divisor, 100 / self.divisor),  # CLIP caps its logit scale at 100
            licence="MIT",
            differentiable=True,
            needs=("prompt",),
            normalisation=normalisation,
            version=f"{fingerprint_of(model)} {fingerprint_of(processor)}",
        )
        super().__init__(spec, device, batch_size, offload)
        self.model, self.processor = model, processor

    def read(self) -> Towers:
        """Read both towers."""
        return read_hugging_face(self.model, self.processor)

    def rate(self, batch: MediaBatch) -> Float[Tensor, "n 1"]:
        """Return exp(logit_scale) cos(image, text), averaged over frames."""
        cosine = prompt_similarity(self.network, batch, self.batch_size)[:, None]
        return self.network.scale * cosine / self.divisor
