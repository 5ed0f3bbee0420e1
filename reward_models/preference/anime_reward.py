"""Implements the two dimensions of AnimeReward that transformers models can compute.

AnimeReward scores anime videos made from a first image in six dimensions. Four of them use models
that need other versions of transformers or belong to no library. The closest alternatives are
`FlowSmoothness` for visual_smooth, `DynamicDegree` for visual_motion, `Aesthetic` for
visual_quality, and `SubjectConsistency` for character_consist. The aggregation over frames is not
published; we average.

Source: AnimeReward, arXiv:2504.10044; the reward script of Index-anisora names models and inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from flowalign.types import MediaBatch, PositiveInt, RewardSpec
from reward_models.backbones.checkpoints import fingerprint_of, read_tokenizer, read_transformers
from reward_models.backbones.clip_towers import Preprocessing
from reward_models.backbones.libraries import transformers
from reward_models.backbones.pixels import sample_frames
from reward_models.backbones.reward_bases import NetworkReward

DIMS = ("text_video_consist", "img_video_consist")
FIRST = 144
"""Number of frames that are used, from the start of the video."""


@dataclass(eq=False, repr=False)
class AnimeReward(NetworkReward):
    """Scores how well frames match the caption, and how similar they are to the first image.

    text_video_consist: mean probability of BLIP's matching head, from 0 to 1. img_video_consist:
    mean cosine of BLIP's image embeddings with the first reference's. `model` is a BLIP for
    image-text retrieval; `frames` evenly spaced frames are used.
    """

    network: "transformers.BlipForImageTextRetrieval" = field(init=False)
    model: str = "Salesforce/blip-itm-large-coco"
    dims: Sequence[str] = DIMS
    frames: PositiveInt = 8
    batch_size: PositiveInt = field(default=4, kw_only=True)

    def declare(self) -> RewardSpec:
        """Return the declaration."""
        if not self.dims or len(set(self.dims)) < len(self.dims) or set(self.dims) - set(DIMS):
            raise ValueError(
                f"dims of AnimeReward are {list(self.dims)}; supported are {', '.join(DIMS)}"
            )
        return RewardSpec(
            name="anime_reward",
            dims=tuple(self.dims),
            modality="video",
            scale=(-1.0, 1.0),
            licence="BSD-3-Clause",
            differentiable=True,
            needs=("prompt", "references") if DIMS[1] in self.dims else ("prompt",),
            version=f"{fingerprint_of(self.model)} {self.frames} frames",
        )

    def read(self) -> nn.Module:
        """Read BLIP and its tokenizer."""
        network = read_transformers(transformers.BlipForImageTextRetrieval, self.model)
        self.longest: int = network.config.text_config.max_position_embeddings
        self.preprocessing = Preprocessing(network.config.vision_config.image_size, "squash")
        self.tokenizer = read_tokenizer(self.model)
        return network

    def rate(self, batch: MediaBatch) -> Float[Tensor, "n R"]:
        """Score each video, one at a time."""
        return torch.stack([self._rated(batch.take([i])) for i in range(len(batch))])

    def _rated(self, sample: MediaBatch) -> Float[Tensor, "R"]:
        seen = self._seen(sample_frames(sample.media[0, :FIRST], self.frames))
        scores = {}
        if DIMS[0] in self.spec.dims:
            scores[DIMS[0]] = self._matches(seen, sample.prompts[0])
        if DIMS[1] in self.spec.dims:
            with torch.no_grad():
                first = self._embedded(self._seen(sample.references[0][0][None]))
            scores[DIMS[1]] = (self._embedded(seen) * first).sum(1).mean()
        return torch.stack([scores[dim] for dim in self.spec.dims]).float()

    def _seen(self, pictures: Float[Tensor, "F 3 h w"]) -> Float[Tensor, "F L d"]:
        pixels = self.preprocessing(pictures.to(self.place, torch.float32))
        return self.network.vision_model(pixel_values=pixels).last_hidden_state

    def _embedded(self, seen: Float[Tensor, "F L d"]) -> Float[Tensor, "F p"]:
        return F.normalize(self.network.vision_proj(seen[:, 0]), dim=-1)

    def _matches(self, seen: Float[Tensor, "F L d"], prompt: str) -> Float[Tensor, ""]:
        tokens = self.tokenizer(
            [prompt] * len(seen), return_tensors="pt", truncation=True, max_length=self.longest
        ).to(self.place)
        hidden = self.network.text_encoder(
            input_ids=tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
            encoder_hidden_states=seen,
            encoder_attention_mask=seen.new_ones(seen.shape[:2], dtype=torch.long),
        ).last_hidden_state
        return self.network.itm_head(hidden[:, 0]).softmax(-1)[:, 1].mean()
