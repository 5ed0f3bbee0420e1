"""Implements rewards from the features of CLIP: cosine similarity with the prompt, and aesthetics.

CLIPScore: Hessel et al. 2021, arXiv:2104.08718v3, Eq. (1), without its factor 2.5 and its clip at
0. PickScore, trained on annotators' choices between two images: Kirstain et al. 2023,
arXiv:2305.01569v2, section 3. HPSv2 and v2.1, a fine-tuned ViT-H-14: Wu et al. 2023,
arXiv:2306.09341v2. Unlike for CLIP, images are resized by their longest side and padded with black.
Scores are comparable only for the same prompt and version.

LAION's aesthetic predictors are a small head on CLIP's normalised image embedding. v2
(improved-aesthetic-predictor, `sac+logos+ava1-l14-linearMSE.pth`) uses CLIP ViT-L/14. v2.5 has the
same head on SigLIP so400m and is released under AGPL-3.0.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from flowalign.types import EmbedsImages, MediaBatch, RewardSpec
from reward_models.backbones.checkpoints import (
    find_file,
    fingerprint_of,
    load_exactly,
    read_tensors,
    to_float32,
)
from reward_models.backbones.clip_towers import (
    Towers,
    prompt_similarity,
    read_hugging_face,
    read_open_clip,
    read_towers,
)
from reward_models.backbones.pixels import average_over_frames
from reward_models.backbones.reward_bases import NetworkReward


@dataclass(eq=False, repr=False)
class TowerReward(NetworkReward, EmbedsImages):
    """Reward of two towers. Its image tower also compares images."""

    network: Towers = field(init=False)

    @override
    @torch.no_grad()
    def embed(self, batch: MediaBatch) -> Float[Tensor, "n d"]:
        """Return the embedding of each image, or the mean over the frames of each video."""
        self.load()
        self.network.to(self.place)
        embedded = self.network.images(batch.media.flatten(0, 1), self.batch_size)
        if self.offload:
            self.network.to("cpu")
        return embedded.unflatten(0, batch.media.shape[:2]).mean(1)

    def rate(self, batch: MediaBatch) -> Float[Tensor, "n 1"]:
        """Return cos(image, text), averaged over frames."""
        return prompt_similarity(self.network, batch, self.batch_size)[:, None]


@dataclass(eq=False, repr=False)
class CLIPScore(TowerReward):
    """Scores the cosine similarity in [-1, 1]; a video scores the mean over its frames.

    `model` is an architecture of open_clip, or a JSON file of sizes in open_clip's format, and
    `pretrained` one of its tags, or a checkpoint file. Without `pretrained`, `model` is a Hugging
    Face folder or hub repository of a CLIP or SigLIP model, or a folder in open_clip's format.
    """

    model: str = "ViT-L-14"
    pretrained: str | None = "openai"

    def declare(self) -> RewardSpec:
        """Return the declaration."""
        return RewardSpec(
            name="clip_score",
            dims=("clip_score",),
            scale=(-1.0, 1.0),
            licence="MIT",
            differentiable=True,
            needs=("prompt",),
            version=f"{fingerprint_of(self.model)} {fingerprint_of(self.pretrained)}",
        )

    def read(self) -> Towers:
        """Read both towers."""
        return read_towers(self.model, self.pretrained)


DIVISORS = {"none": 1, "divided by 26": 26}


@dataclass(eq=False, repr=False)
class PickScore(TowerReward):
    """Scores exp(logit_scale) cos(image, text); a video scores the mean over its frames.

    The preference between images of one prompt is the softmax of their scores. Flow-GRPO divides
    scores by 26 to scale them to about [0, 1]; set `normalisation` to do the same. `model` and
    `processor` (tokenizer and preprocessing) are Hugging Face folders or hub repositories.
    """

    model: str = "yuvalkirstain/PickScore_v1"
    processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    normalisation: Literal["none", "divided by 26"] = "none"

    def declare(self) -> RewardSpec:
        """Return the declaration."""
        largest = 100 / DIVISORS[self.normalisation]  # CLIP caps its logit scale at 100
        return RewardSpec(
            name="pickscore",
            dims=("pickscore",),
            scale=(-largest, largest),
            licence="MIT",
            differentiable=True,
            needs=("prompt",),
            normalisation=self.normalisation,
            version=f"{fingerprint_of(self.model)} {fingerprint_of(self.processor)}",
        )

    def read(self) -> Towers:
        """Read both towers."""
        return read_hugging_face(self.model, self.processor)

    def rate(self, batch: MediaBatch) -> Float[Tensor, "n 1"]:
        """Return exp(logit_scale) cos(image, text), averaged over frames."""
        return self.network.scale * super().rate(batch) / DIVISORS[self.normalisation]


FILES = {"v2": "HPS_v2_compressed.pt", "v2.1": "HPS_v2.1_compressed.pt"}


@dataclass(eq=False, repr=False)
class HPSv2(TowerReward):
    """Scores cos(image, text), usually 0.2 to 0.35 (papers report it times 100).

    A video scores the mean over its frames. `weights` is a checkpoint file, or a folder or hub
    repository that has the file of this `version`; `model` is an architecture of open_clip, or a
    JSON file of sizes.
    """

    version: Literal["v2", "v2.1"] = "v2.1"
    weights: str = "xswu/HPSv2"
    model: str = "ViT-H-14"

    def declare(self) -> RewardSpec:
        """Return the declaration."""
        name = f"hps{self.version}".replace(".", "_")
        return RewardSpec(
            name=name,
            dims=(name,),
            scale=(-1.0, 1.0),
            licence="Apache-2.0",
            differentiable=True,
            needs=("prompt",),
            version=f"{fingerprint_of(self.weights)} {fingerprint_of(self.model)}",
        )

    def read(self) -> Towers:
        """Read both towers and set HPSv2's preprocessing."""
        towers = read_open_clip(self.model, str(find_file(self.weights, FILES[self.version])))
        towers.preprocessing = replace(towers.preprocessing, resize="longest")
        return towers


class LinearStack(nn.Module):
    """Linear layers n-1024-128-64-16-1 with only (unused) dropout between them.

    ImageReward has the same head; the keys of `layers` are indices in the original's list.
    """

    def __init__(self, width: int):
        super().__init__()
        sizes = {0: (width, 1024), 2: (1024, 128), 4: (128, 64), 6: (64, 16), 7: (16, 1)}
        self.layers = nn.ModuleDict({str(i): nn.Linear(*size) for i, size in sizes.items()})

    def forward(self, embedding: Float[Tensor, "n d"]) -> Float[Tensor, "n 1"]:
        """Return one score per embedding."""
        for layer in self.layers.values():
            embedding = layer(embedding)
        return embedding


def build_linear_stack(tensors: Mapping[str, Tensor], source: str | Path) -> LinearStack:
    """Build the head with these weights; the first layer determines its input width."""
    first = tensors.get("layers.0.weight")
    if first is None or first.ndim != 2:
        raise ValueError(f"{source} does not fit LinearStack\n1 missing: layers.0.weight")
    head = LinearStack(first.shape[1])
    load_exactly(head, to_float32(tensors), source)
    return head


@dataclass(eq=False, repr=False)
class Aesthetic(NetworkReward):
    """Predicts the aesthetic rating of an image, about 1 to 10; a video scores its frames' mean.

    The prompt is not used. `head` is the file, or a folder or hub repository that has `head_file`.
    `clip` is a Hugging Face folder or hub repository or, with `pretrained`, a model of open_clip
    (`ViT-L-14`, `openai`). For v2.5, `clip` is `google/siglip-so400m-patch14-384`.
    """

    head: str = "trl-lib/ddpo-aesthetic-predictor"
    head_file: str = "aesthetic-model.pth"
    clip: str = "openai/clip-vit-large-patch14"
    pretrained: str | None = None

    def declare(self) -> RewardSpec:
        """Return the declaration."""
        parts = self.head, self.head_file, self.clip, self.pretrained
        return RewardSpec(
            name="aesthetic",
            dims=("aesthetic",),
            licence="Apache-2.0",
            differentiable=True,
            version=" ".join(map(fingerprint_of, parts)),
        )

    def read(self) -> nn.Module:
        """Read the head and the image tower (with the text tower, which is not used)."""
        path = find_file(self.head, self.head_file)
        head = build_linear_stack(read_tensors(path), path)
        return nn.ModuleDict({"towers": read_towers(self.clip, self.pretrained), "head": head})

    def rate(self, batch: MediaBatch) -> Float[Tensor, "n 1"]:
        """Return head(embedding / |embedding|), averaged over frames."""
        embedded = self.network["towers"].images(batch.media.flatten(0, 1), self.batch_size)
        return average_over_frames(batch.media, self.network["head"](embedded)[:, 0])[:, None]
