"""Implements HPSv3: human preference for an image as a Gaussian, from Qwen2-VL 7B.

Ported from the package hpsv3 1.0.0. `HPSv3.safetensors` holds the whole model, so only the config
and tokenizer of the base are needed.
"""

from pathlib import Path

import torch
from torch import nn

from flowalign.types import MediaBatch, PositiveInt, RewardSpec
from reward_models.backbones import qwen2_vl
from reward_models.backbones.checkpoints import find_file, fingerprint_of, read_tensors
from reward_models.backbones.libraries import transformers
from reward_models.backbones.network_reward import BatchScores, NetworkReward, place_rows
from reward_models.backbones.pixels import resize

INSTRUCTION = (Path(__file__).parents[1] / "instructions" / "hpsv3.txt").read_text()
TOKEN = "<|Reward|>"
PIXELS = 256 * 28 * 28
"""Target area of every image in pixels; lower and upper bound are equal."""


class HPSv3(NetworkReward):
    """Scores one unbounded dimension, the mean; the standard deviation becomes the uncertainty.

    `checkpoint` is a file, folder or hub repository with `HPSv3.safetensors`; `base` is one with
    the config and tokenizer of Qwen2-VL.
    """

    tokenizer: "transformers.Qwen2Tokenizer"

    def __init__(
        self,
        checkpoint: str = "MizzenAI/HPSv3",
        base: str = "Qwen/Qwen2-VL-7B-Instruct",
        position_mode: qwen2_vl.PositionMode = "sequential",
        dtype: qwen2_vl.Dtype = "bfloat16",
        device: str = "auto",
        batch_size: PositiveInt = 8,
        offload: bool = False,
    ):
        qwen2_vl.check_options(position_mode, dtype)
        self.checkpoint, self.base = checkpoint, base
        self.position_mode: qwen2_vl.PositionMode = position_mode
        self.dtype: qwen2_vl.Dtype = dtype
        settings = (
            fingerprint_of(checkpoint),
            fingerprint_of(base),
            f"{position_mode} positions",
            dtype,
        )
        spec = RewardSpec(
            name="hpsv3",
            dims=("hpsv3",),
            modality="image",
            scale=(-torch.inf, torch.inf),
            licence="MIT",
            differentiable=True,
            needs=("prompt",),
            version=", ".join(settings),
        )
        super().__init__(spec, device, batch_size, offload)

    def read(self) -> nn.Module:
        """Read backbone and head from one file."""
        config, self.tokenizer = qwen2_vl.read_base(self.base, [TOKEN])
        path = find_file(self.checkpoint, "HPSv3.safetensors")
        return qwen2_vl.build_network(
            config, preference_head, read_tensors(path), path, self.position_mode, self.dtype
        )

    def rate(self, batch: MediaBatch) -> BatchScores:
        """Return mean and standard deviation of every image."""
        chats, failed = qwen2_vl.collect_chats(len(batch), lambda i: self._chat(batch, i))
        if not chats:
            nothing = torch.full((len(batch), 1), torch.nan)
            return BatchScores(nothing, nothing, failed)
        mark = self.tokenizer.convert_tokens_to_ids(TOKEN)
        out = place_rows(
            self.network(list(chats.values()), [mark], "image")[:, 0], [*chats], len(batch)
        )
        return BatchScores(out[:, :1], out[:, 1:].exp(), failed)

    def _chat(self, batch: MediaBatch, i: int) -> qwen2_vl.Chat:
        picture = batch.media[i].to(self.device).float()
        size = qwen2_vl.fit_size(picture.shape[-2], picture.shape[-1], PIXELS, PIXELS)
        patches, grid = qwen2_vl.cut_patches(resize(picture, size[0], size[1], quantised=True))
        text = qwen2_vl.fill_instruction(self.tokenizer, INSTRUCTION, batch.prompts[i])
        return qwen2_vl.Chat(
            qwen2_vl.tokenize_chat(self.tokenizer, text, "image", qwen2_vl.count_tokens(grid)),
            patches,
            grid,
        )


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
