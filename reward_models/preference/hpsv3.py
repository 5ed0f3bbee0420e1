"""Implements HPSv3 and HPSv3++: human preference for an image.

HPSv3 gives a Gaussian, from Qwen2-VL 7B. Ported from the package hpsv3 1.0.0. `HPSv3.safetensors`
holds the whole model, so only the config and tokenizer of the base are needed.

HPSv3++ follows PlantPotatoOnMoon/HPSv3-PlusPlus @ 7bdbebc. The hidden state of a Qwen3-VL 8B at the
token `<|Reward|>` is modulated (FiLM) by two inputs: the capability of the generator, which an
encoder infers from images, and the progress of reinforcement learning. `hpsv3++.pth` holds the
whole model.

Source: HPSv3++, arXiv:2606.14657.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from flowalign.types import MediaBatch, Range, RewardSpec
from reward_models.backbones import qwen2_vl
from reward_models.backbones.checkpoints import (
    find_file,
    fingerprint_of,
    read_tensors,
    rename_tensors,
)
from reward_models.backbones.pixels import resize
from reward_models.backbones.reward_bases import BatchScores

INSTRUCTION = (Path(__file__).parents[1] / "instructions" / "hpsv3.txt").read_text(encoding="utf-8")
TOKEN = "<|Reward|>"
PIXELS = 256 * 28 * 28
"""Target area of every image in pixels; lower and upper bound are equal."""


@dataclass(eq=False, repr=False)
class HPSv3(qwen2_vl.QwenReward):
    """Scores one unbounded dimension, the mean; the standard deviation becomes the uncertainty.

    `checkpoint` is a file, folder or hub repository with `HPSv3.safetensors`; `base` is one with
    the config and tokenizer of Qwen2-VL.
    """

    checkpoint: str = "MizzenAI/HPSv3"
    base: str = "Qwen/Qwen2-VL-7B-Instruct"
    position_mode: qwen2_vl.PositionMode = "sequential"

    def declare(self) -> RewardSpec:
        """Return the declaration."""
        weights = fingerprint_of(self.checkpoint), fingerprint_of(self.base)
        return RewardSpec(
            name="hpsv3",
            dims=("hpsv3",),
            modality="image",
            licence="MIT",
            differentiable=True,
            needs=("prompt",),
            version=", ".join([*weights, f"{self.position_mode} positions", self.dtype]),
        )

    def read(self) -> nn.Module:
        """Read backbone and head from one file."""
        config, self.tokenizer = qwen2_vl.read_base(self.base, [TOKEN])
        path = find_file(self.checkpoint, "HPSv3.safetensors")
        return qwen2_vl.build_network(
            config, preference_head, read_tensors(path), path, self.position_mode, self.dtype
        )

    def rate(self, batch: MediaBatch) -> BatchScores:
        """Return mean and standard deviation of every image."""
        chats = [self._chat(batch, i) for i in range(len(batch))]
        mark = self.tokenizer.convert_tokens_to_ids(TOKEN)
        out = self.network(chats, [mark], "image")[:, 0]
        return BatchScores(out[:, :1], out[:, 1:].exp())

    def _chat(self, batch: MediaBatch, i: int) -> qwen2_vl.Chat:
        picture = batch.media[i].to(self.place).float()
        size = qwen2_vl.fit_size(picture.shape[-2], picture.shape[-1], PIXELS, PIXELS)
        cut = qwen2_vl.cut_patches(resize(picture, *size, quantised=True))
        text = INSTRUCTION.replace("{prompt}", batch.prompts[i])
        return qwen2_vl.build_chat(self.tokenizer, text, "image", cut)


def preference_head(width: int) -> nn.Module:
    """Build the layers from a hidden state to mean and log standard deviation."""
    return nn.Sequential(
        nn.Linear(width, 1024),
        nn.ReLU(),
        nn.Dropout(0.05),
        nn.Linear(1024, 16),
        nn.ReLU(),
        nn.Linear(16, 2),
    )


_QUALITY, _, _ALIGNMENT = INSTRUCTION.partition("\n**Text Alignment:**")
PLUS_PLUS_INSTRUCTION = _QUALITY + _ALIGNMENT[_ALIGNMENT.index("Textual prompt") :]
"""HPSv3's instruction without its section on text alignment."""
PATCH, SIDE = 16, 32
"""Pixels per side of Qwen3-VL's patches and tokens."""
BOUNDS = (256 * 256, 4096 * 4096)
"""Minimum and maximum area in pixels that Qwen3-VL's own preprocessing does not resize."""
MEAN = STD = (0.5, 0.5, 0.5)
_FILE = "hpsv3++.pth"
_PARTS = ((r"^(rm_head|cap_encoder|cond_encoder|film_gen)\.", r"rm_heads.\1."),)

Grouping = Literal["image", "group"]


class Capability(nn.Module):
    """Encoder of a generator's capability, in (0, 1), from features of some of its images."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.proj = nn.Linear(width, hidden)
        self.pool_attn = nn.Linear(hidden, 1)
        self.out_proj = nn.Linear(hidden, 1)

    def forward(
        self, features: Float[Tensor, "n D"], groups: Int[Tensor, "n"]
    ) -> Float[Tensor, "n"]:
        """Pool each group's images by attention; all members get the capability of the group."""
        x = self.proj(features)
        logits = self.pool_attn(x).T
        same = groups[:, None] == groups[None, :]
        weights = logits.expand(len(x), -1).masked_fill(~same, -torch.inf).softmax(1)
        return self.out_proj(weights @ x)[:, 0].sigmoid()


class ConditionedHead(nn.Module):
    """Head on features modulated by the capability of their group and the progress of training."""

    def __init__(self, width: int, condition: int = 256):
        super().__init__()
        self.rm_head = preference_head(width)
        self.cap_encoder = Capability(width, condition)
        self.cond_encoder = nn.Sequential(
            nn.Linear(2, condition), nn.GELU(), nn.Linear(condition, condition)
        )
        self.film_gen = nn.Sequential(
            nn.Linear(condition, width), nn.ReLU(), nn.Linear(width, 2 * width)
        )

    def forward(
        self, features: Float[Tensor, "n D"], groups: Int[Tensor, "n"], iteration: float = 0.0
    ) -> Float[Tensor, "n 2"]:
        """Return mean and log standard deviation: head(h (1 + gamma) + beta)."""
        capability = self.cap_encoder(features, groups)
        condition = torch.stack([capability, torch.full_like(capability, iteration)], 1)
        gamma, beta = self.film_gen(self.cond_encoder(condition)).chunk(2, 1)
        return self.rm_head(features * (1 + gamma) + beta)


@dataclass(eq=False, repr=False)
class HPSv3PlusPlus(qwen2_vl.QwenReward):
    """Scores one unbounded dimension, the mean; the standard deviation becomes the uncertainty.

    `checkpoint` is a file or folder with `hpsv3++.pth`; `base` has the config and tokenizer of
    Qwen3-VL. The capability is inferred from each `image` alone, or from all images of a `group`.
    With `group` a score depends on the other images of its request. The released inference treats
    all images of a batch as one group, so its scores depend on the batch. `iteration` is 0 for
    images of a model without reinforcement learning. The authors train it as min(1, step / 1000)
    and recommend .3 + .7 p at progress p of a run.

    Scores are differentiable, including through the inferred capability.
    """

    rates_whole_batches = True

    checkpoint: str
    base: str = "Qwen/Qwen3-VL-8B-Instruct"
    capability: Grouping = "image"
    iteration: Annotated[float, Range(least=0, most=1)] = 0.0

    def declare(self) -> RewardSpec:
        """Return the declaration."""
        weights = fingerprint_of(self.checkpoint), fingerprint_of(self.base)
        return RewardSpec(
            name="hpsv3_plus_plus",
            dims=("hpsv3_plus_plus",),
            modality="image",
            differentiable=True,
            needs=("prompt", "groups") if self.capability == "group" else ("prompt",),
            version=", ".join([*weights, f"{self.capability} at {self.iteration:g}", self.dtype]),
        )

    def read(self) -> nn.Module:
        """Read backbone and head from one file."""
        config, self.tokenizer = qwen2_vl.read_base(self.base, [TOKEN], "qwen3_vl")
        path = find_file(self.checkpoint, _FILE)
        tensors = rename_tensors(read_tensors(path), _PARTS)
        return qwen2_vl.build_network(config, ConditionedHead, tensors, path, "mrope", self.dtype)

    def rate(self, batch: MediaBatch) -> BatchScores:
        """Return mean and standard deviation of every image."""
        mark = self.tokenizer.convert_tokens_to_ids(TOKEN)
        chats = (
            [self._chat(some, i) for i in range(len(some))]
            for some in batch.chunks(self.batch_size)
        )
        features = torch.cat([self.network.hidden(some, [mark], "image")[:, 0] for some in chats])
        groups = range(len(batch)) if self.capability == "image" else batch.groups
        out = self.network.head(
            features, torch.tensor([*groups], device=features.device), self.iteration
        )
        return BatchScores(out[:, :1], out[:, 1:].exp())

    def _chat(self, batch: MediaBatch, i: int) -> qwen2_vl.Chat:
        picture = batch.media[i].to(self.place).float()
        cut = qwen2_vl.cut_patches(resize_twice(picture), PATCH, MEAN, STD)
        text = PLUS_PLUS_INSTRUCTION.replace("{prompt}", batch.prompts[i])
        return qwen2_vl.build_chat(self.tokenizer, text, "image", cut, system="")


def resize_twice(image: Float[Tensor, "1 3 H W"]) -> Float[Tensor, "1 3 h w"]:
    """Resize as the authors do: to HPSv3's size in multiples of 28, then to multiples of 32."""
    size = qwen2_vl.fit_size(image.shape[-2], image.shape[-1], PIXELS, PIXELS)
    image = resize(image, *size, quantised=True)
    return resize(image, *qwen2_vl.fit_size(*size, *BOUNDS, side=SIDE), quantised=True)
