"""Implements EditReward: how well an edit follows its instruction, and its visual quality.

The computation follows TIGER-AI-Lab/EditReward @ edb027e: a fully fine-tuned Qwen2.5-VL with two
heads. Each head has a separate instruction and a separate forward pass. The bundled instructions
ask for the same in our wording. Use the published texts to obtain the scores of the paper.

Source: EditReward, arXiv:2509.26346.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from flowalign.types import MediaBatch, RewardSpec
from flowalign.utils.files import bundled
from reward_models.backbones import qwen2_vl
from reward_models.backbones.checkpoints import (
    find_file,
    fingerprint_of,
    read_tensors,
    read_weights,
)
from reward_models.backbones.pixels import resize
from reward_models.backbones.reward_bases import BatchScores
from reward_models.preference.hpsv3 import preference_head

Fusion = Literal["mean", "min", "sum"]
DIMS = ("edit_following", "edit_quality", "edit_overall")
TOKEN = "<|Reward|>"
PIXELS = 256 * 28 * 28
"""Target area of both images in pixels; lower and upper bound are equal."""
_INSTRUCTIONS = Path(__file__).parents[1] / "instructions"


def fuse_heads(heads: Float[Tensor, "n 2 2"], fusion: Fusion = "mean") -> Float[Tensor, "n 2"]:
    """Combine the heads' (mean, log of the standard deviation) into those of the overall score.

    `mean` and `min` apply to both numbers; `sum` adds the means and the variances.
    """
    if fusion == "mean":
        return heads.mean(1)
    if fusion == "min":
        return heads.amin(1)
    variance = (2 * heads[..., 1]).exp().sum(1)
    return torch.stack([heads[..., 0].sum(1), variance.sqrt().log()], 1)


@dataclass(frozen=True, kw_only=True)
class Instructions:
    """Texts that the heads were trained with."""

    following: str = str(_INSTRUCTIONS / "edit_reward_following.txt")
    """File of the first head's instruction; it contains `{prompt}` and the token `<|Reward|>`."""
    quality: str = str(_INSTRUCTIONS / "edit_reward_quality.txt")
    """File of the second head's instruction."""
    system: str = "You are a helpful assistant."
    """System prompt of the base; MiMo-VL has another."""


_BUNDLED = Instructions()


@dataclass(eq=False, repr=False)
class EditReward(qwen2_vl.QwenReward):
    """Scores following, quality and overall, unbounded, each with its standard deviation.

    `checkpoint` is a file, a folder with `model.pth` or `model.safetensors`, or a hub repository
    with the latter. `base` is a folder or repository with the config and tokenizer of a Qwen2.5-VL,
    which includes MiMo-VL. The overall score is `fusion` of the heads; the published config uses
    the mean. An edit is shown after its source, the first reference. Positions count tokens, as in
    the original, which passes its own embeddings to the language model.
    """

    checkpoint: str
    base: str = "Qwen/Qwen2.5-VL-7B-Instruct"
    fusion: Fusion = "mean"
    instructions: Instructions = _BUNDLED

    def declare(self) -> RewardSpec:
        """Return the declaration."""
        texts = self.instructions
        self.asked = [_instruction(path) for path in (texts.following, texts.quality)]
        weights = fingerprint_of(self.checkpoint), fingerprint_of(self.base)
        asked = hashlib.sha256("".join([*self.asked, texts.system]).encode()).hexdigest()[:16]
        return RewardSpec(
            name="edit_reward",
            dims=DIMS,
            modality="image",
            licence="MIT",
            differentiable=True,
            needs=("prompt", "references"),
            version=", ".join([*weights, self.fusion, asked, self.dtype]),
        )

    def read(self) -> nn.Module:
        """Read backbone and heads from one checkpoint."""
        config, self.tokenizer = qwen2_vl.read_base(self.base, [TOKEN], "qwen2_5_vl")
        tensors = _weights(self.checkpoint)
        return qwen2_vl.build_network(config, _Heads, tensors, self.checkpoint, dtype=self.dtype)

    @override
    def examine(self, sample: MediaBatch) -> None:
        images = sample.references[0][0], sample.media
        qwen2_vl.check_chat(self.tokenizer, sample.prompts[0], *images)

    def rate(self, batch: MediaBatch) -> BatchScores:
        """Return mean and standard deviation of every edit, from one forward pass per head."""
        mark, heads = self.tokenizer.convert_tokens_to_ids(TOKEN), list[Tensor]()
        for head, instruction in enumerate(self.asked):
            chats = [self._chat(batch, i, instruction) for i in range(len(batch))]
            heads.append(self.network(chats, [mark], "image")[:, 0, head])
        both = torch.stack(heads, 1)
        out = torch.cat([both, fuse_heads(both, self.fusion)[:, None]], 1)
        return BatchScores(out[..., 0], out[..., 1].exp())

    def _chat(self, batch: MediaBatch, i: int, instruction: str) -> qwen2_vl.Chat:
        images = batch.references[i][0][None], batch.media[i]
        cut = [qwen2_vl.cut_patches(_fit(image.to(self.place).float())) for image in images]
        text, system = instruction.replace("{prompt}", batch.prompts[i]), self.instructions.system
        return qwen2_vl.build_chat(self.tokenizer, text, "image", *cut, system=system)


class _Heads(nn.Module):
    """Both heads, named as in the checkpoints, applied to the same features."""

    def __init__(self, width: int):
        super().__init__()
        self.head_0, self.head_1 = preference_head(width), preference_head(width)

    @override
    def forward(self, hidden: Float[Tensor, "n M d"]) -> Float[Tensor, "n M 2 2"]:
        return torch.stack([self.head_0(hidden), self.head_1(hidden)], 2)


def _fit(image: Float[Tensor, "1 3 H W"]) -> Float[Tensor, "1 3 h w"]:
    height, width = qwen2_vl.fit_size(image.shape[-2], image.shape[-1], PIXELS, PIXELS)
    return resize(image, height, width, quantised=True)


def _instruction(path: str) -> str:
    """Read an instruction.

    Raises:
        ValueError: The file is missing, or lacks the prompt or the token.
    """
    file = Path(bundled(path))
    if not file.is_file():
        raise ValueError(f"instruction {path!r} does not exist (looked in {Path.cwd()})")
    text = file.read_text(encoding="utf-8")
    if lacks := [part for part in ("{prompt}", TOKEN) if text.count(part) != 1]:
        raise ValueError(f"instruction {path} must hold {lacks[0]} once")
    return text


def _weights(source: str) -> dict[str, Tensor]:
    path = Path(bundled(source))
    if path.is_file() or (path / "model.pth").is_file():
        return read_tensors(find_file(source, "model.pth"))
    return read_weights(source)
