"""Implements ImageReward: BLIP's text encoder attends to the image, a head reads its first token.

Source: Xu et al. 2023, arXiv:2304.05977v4. The original file is loaded into transformers' BLIP.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from flowalign.types import MediaBatch, RewardSpec
from flowalign.utils.files import read_object
from reward_models.backbones.checkpoints import (
    find_file,
    fingerprint_of,
    load_exactly,
    on_meta_device,
    read_tensors,
    rename_tensors,
    to_float32,
)
from reward_models.backbones.libraries import transformers
from reward_models.backbones.pixels import average_over_frames, crop_shortest_side, normalise
from reward_models.backbones.reward_bases import NetworkReward
from reward_models.preference.clip_rewards import LinearStack

MEAN, STD = 0.16717362830052426, 1.0333394966054072
"""Mean and standard deviation of the raw reward over the authors' data; they standardise scores."""
MAX_TOKENS = 35
SIZES = {
    "image_size": 224,
    "patch_size": 16,
    "vision_width": 1024,
    "vision_depth": 24,
    "vision_heads": 16,
}
"""Sizes of BLIP-large, which the original defines in code and not in a file."""
UNUSED = (
    r"blip\.(vision|text)_proj\.(weight|bias)",  # BLIP's contrastive projections
    r"text\.embeddings\.position_ids",  # 0, 1, 2, ...
)
"""Checkpoint keys that scoring does not use, by their names after `RENAMES`."""
RENAMES = (
    (r"^blip\.visual_encoder\.", "vision."),
    (r"^blip\.text_encoder\.", "text."),
    (r"^mlp\.", "head."),
    (r"^vision\.blocks\.", "vision.encoder.layers."),
    (r"^vision\.norm\.", "vision.post_layernorm."),
    (r"^vision\.patch_embed\.proj\.", "vision.embeddings.patch_embedding."),
    (r"^vision\.cls_token$", "vision.embeddings.class_embedding"),
    (r"^vision\.pos_embed$", "vision.embeddings.position_embedding"),
    (r"\.attn\.qkv\.", ".self_attn.qkv."),
    (r"\.attn\.proj\.", ".self_attn.projection."),
    (r"\.norm([12])\.", r".layer_norm\1."),
)
"""Maps the original's names to names in transformers; names in the text encoder are equal."""


class ImageRewardNetwork(nn.Module):
    """BLIP's image encoder, its text encoder with cross-attention, and the head."""

    def __init__(self, sizes: Mapping[str, int], med: Mapping[str, Any], vocabulary: int):
        super().__init__()
        self.vision = transformers.models.blip.modeling_blip.BlipVisionModel(
            transformers.BlipVisionConfig(
                hidden_size=sizes["vision_width"],
                intermediate_size=4 * sizes["vision_width"],
                num_hidden_layers=sizes["vision_depth"],
                num_attention_heads=sizes["vision_heads"],
                image_size=sizes["image_size"],
                patch_size=sizes["patch_size"],
                layer_norm_eps=1e-6,
            )
        )
        kept = (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
            "layer_norm_eps",
            "hidden_act",
        )
        self.text = transformers.BlipTextModel(
            transformers.BlipTextConfig(
                vocab_size=vocabulary,
                encoder_hidden_size=sizes["vision_width"],
                bos_token_id=None,
                sep_token_id=None,
                is_decoder=True,  # transformers builds cross-attention only then
                **{key: med[key] for key in kept if key in med},
            ),
            add_pooling_layer=False,
        )
        self.head = LinearStack(self.text.config.hidden_size)

    def forward(
        self, pixels: Float[Tensor, "n 3 h w"], ids: Tensor, mask: Tensor
    ) -> Float[Tensor, "n"]:
        """Return raw rewards of preprocessed images and their tokens."""
        seen = self.vision(pixel_values=pixels).last_hidden_state
        read = self.text(
            input_ids=ids, attention_mask=mask, encoder_hidden_states=seen, is_decoder=False
        )
        return self.head(read.last_hidden_state[:, 0])[:, 0]


@dataclass(eq=False, repr=False)
class ImageReward(NetworkReward):
    """Scores the standardised reward, about N(0, 1) over the authors' data.

    A video scores the mean over its frames. `model` is a hub repository, or a folder, with
    `ImageReward.pt` and `med_config.json`, and with `sizes.json` if the image encoder is not
    BLIP-large's. `tokenizer` is a folder or hub repository with BERT's `vocab.txt`. Prompts are
    truncated to 35 tokens.
    """

    network: ImageRewardNetwork = field(init=False)
    model: str = "THUDM/ImageReward"
    tokenizer: str = "google-bert/bert-base-uncased"

    def declare(self) -> RewardSpec:
        """Return the declaration."""
        return RewardSpec(
            name="image_reward",
            dims=("image_reward",),
            licence="Apache-2.0",
            differentiable=True,
            needs=("prompt",),
            normalisation="z-score",
            version=f"{fingerprint_of(self.model)} {fingerprint_of(self.tokenizer)}",
        )

    def read(self) -> ImageRewardNetwork:
        """Read BLIP and the head; every key of the file is used or listed in `UNUSED`."""
        path = find_file(self.model, "ImageReward.pt")
        med = read_object(find_file(self.model, "med_config.json"))
        self.sizes = _read_sizes(path.parent)
        self.words = transformers.BertTokenizer(str(find_file(self.tokenizer, "vocab.txt")))
        tensors = to_float32(read_tensors(path))
        words = tensors.get("blip.text_encoder.embeddings.word_embeddings.weight")
        if words is None:
            raise ValueError(f"{path} has no word embeddings; it is not an ImageReward checkpoint")
        with on_meta_device():
            network = ImageRewardNetwork(self.sizes, med, len(words))
        load_exactly(network, rename_tensors(tensors, RENAMES), path, unused=UNUSED)
        return network

    def rate(self, batch: MediaBatch) -> Float[Tensor, "n 1"]:
        """Return (raw - MEAN) / STD, averaged over frames."""
        frames = batch.media.flatten(0, 1)
        prompts = [prompt for prompt in batch.prompts for _ in range(batch.media.shape[1])]
        starts = range(0, len(prompts), self.batch_size)
        parts = [
            self._raw(frames[i : i + self.batch_size], prompts[i : i + self.batch_size])
            for i in starts
        ]
        return (average_over_frames(batch.media, torch.cat(parts))[:, None] - MEAN) / STD

    def _raw(self, frames: Tensor, prompts: Sequence[str]) -> Float[Tensor, "n"]:
        tokens = self.words(
            list(prompts),
            padding="max_length",
            truncation=True,
            max_length=MAX_TOKENS,
            return_tensors="pt",
        ).to(self.place)
        frames = frames.to(self.place, torch.float32)
        pixels = normalise(crop_shortest_side(frames, self.sizes["image_size"], quantised=True))
        return self.network(pixels, tokens["input_ids"], tokens["attention_mask"])


def _read_sizes(folder: Path) -> dict[str, int]:
    """Return the sizes in the folder's `sizes.json`, or those of BLIP-large."""
    path = folder / "sizes.json"
    return {key: read_object(path)[key] for key in SIZES} if path.is_file() else SIZES
