"""Implements VideoReward (VideoAlign): visual quality, motion quality and text alignment.

Ported from KwaiVGI/VideoAlign. Both published forms of a checkpoint are supported: the whole PEFT
model (`model.pth`), and an adapter together with the other trained weights, which needs the base
model's weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from flowalign.types import MediaBatch, PositiveInt, RewardSpec
from flowalign.utils.files import read_object
from reward_models.backbones import qwen2_vl
from reward_models.backbones.checkpoints import (
    find_folder,
    fingerprint_of,
    read_tensors,
    read_weights,
    rename_tensors,
    require_settings,
)
from reward_models.backbones.pixels import at_rate, resize
from reward_models.backbones.prefix import (
    ClipCache,
    continue_clips,
    group_by_size,
    hash_clip,
    read_clips,
)

Normalisation = Literal["checkpoint", "published", "none"]
INSTRUCTION = (Path(__file__).parents[1] / "instructions" / "video_reward.txt").read_text(
    encoding="utf-8"
)
DIMS = ("VQ", "MQ", "TA")
TOKENS = tuple(f"<|{dim}_reward|>" for dim in DIMS)
"""Special tokens. Their order is part of the model: text after a token cannot change its score, so
VQ and MQ do not depend on the prompt."""
PUBLISHED = {
    "VQ_mean": 3.6757,
    "VQ_std": 2.2476,
    "MQ_mean": 1.1646,
    "MQ_std": 1.3811,
    "TA_mean": 2.8105,
    "TA_std": 2.5121,
}
FEWEST_PIXELS = 128 * 28 * 28
"""Minimum area of a frame in pixels; the maximum is in the checkpoint's config."""
_SUPPORTED = {
    "data_config.num_frames": None,
    "data_config.sample_type": "uniform",
    "data_config.eval_dim": list(DIMS),
    "data_config.prompt_template_type": "detailed_special",
    "model_config.output_dim": 3,
    "model_config.use_special_tokens": True,
    "model_config.reward_token": "special",
}
"""Values of a checkpoint's `model_config.json` that this implementation supports."""


@dataclass(eq=False, repr=False)
class VideoReward(qwen2_vl.QwenReward):
    """Scores VQ, MQ, TA and their sum, Overall, each standardised by a mean and standard deviation.

    `checkpoint` is a folder or hub repository with `model_config.json` and `checkpoint-<step>/`;
    the last step is loaded. `base` is the folder or repository of the Qwen2-VL base, if it is not
    the one that the config names. `normalisation` takes the constants from the config, or the
    constants that were `published`, or returns the raw scores.

    The keys and values of all tokens of the last `batch_size` clips are cached. For a cached clip
    VQ and MQ are known, and another prompt only costs the computation of TA.
    """

    checkpoint: str = "KwaiVGI/VideoReward"
    base: str | None = None
    position_mode: qwen2_vl.PositionMode = "sequential"
    normalisation: Normalisation = "checkpoint"
    batch_size: PositiveInt = field(default=4, kw_only=True)
    config: dict[str, Any] = field(init=False)
    _kept: dict[str, ClipCache] = field(default_factory=dict, init=False)

    def declare(self) -> RewardSpec:
        """Return the declaration."""
        weights = fingerprint_of(self.checkpoint), fingerprint_of(self.base) or "its own base"
        units = "none" if self.normalisation == "none" else f"z-score ({self.normalisation})"
        return RewardSpec(
            name="video_reward",
            dims=(*DIMS, "Overall"),
            modality="video",
            licence="MIT",
            differentiable=True,
            needs=("prompt", "fps"),
            normalisation=units,
            version=", ".join([*weights, f"{self.position_mode} positions", self.dtype]),
        )

    def read(self) -> nn.Module:
        """Read the backbone, merge the adapter into it, and read the head."""
        folder = find_folder(self.checkpoint)
        self.config = read_object(folder / "model_config.json")
        require_settings(self.config, _SUPPORTED, folder / "model_config.json")
        self.constants = self._constants()
        base = self.base or self.config["model_config"]["model_name_or_path"]
        architecture, self.tokenizer = qwen2_vl.read_base(base, TOKENS)
        step, tensors = read_step(folder, base, self.config["peft_lora_config"])
        return qwen2_vl.build_network(
            architecture, _head, tensors, step, self.position_mode, self.dtype
        )

    @override
    def examine(self, sample: MediaBatch) -> None:
        super().examine(sample)
        self._chosen(sample, 0)

    def rate(self, batch: MediaBatch) -> Float[Tensor, "n 4"]:
        """Return the three scores of every video, and their sum."""
        chats = {i: self._chat(batch, i) for i in range(len(batch))}
        raw = self._raw(chats, shared=not batch.media.requires_grad).cpu()
        scores = (raw - self.constants[0]) / self.constants[1]
        return torch.cat([scores, scores.sum(1, keepdim=True)], 1)

    def _raw(self, chats: Mapping[int, qwen2_vl.Chat], shared: bool) -> Float[Tensor, "n 3"]:
        """Return VQ and MQ of each clip, computed once if `shared`, and TA of each prompt."""
        marks = self.tokenizer.get_added_vocab()
        *quality, alignment = [marks[token] for token in TOKENS]
        cut = {i: chat.ids.index(quality[-1]) + 1 for i, chat in chats.items()}
        names = {i: hash_clip(chat) if shared else str(i) for i, chat in chats.items()}
        clips = {name: self._kept[name] for name in names.values() if name in self._kept}
        new = {
            names[i]: replace(chat, ids=chat.ids[: cut[i]])
            for i, chat in chats.items()
            if names[i] not in clips
        }
        for some in group_by_size(new, lambda chat: len(chat.ids)):
            fresh = read_clips(self.network, [new[name] for name in some], quality)
            clips |= zip(some, fresh, strict=True)
        if shared:
            place = "cpu" if self.offload else self.place
            self._kept = {name: clip.to(place) for name, clip in clips.items()}
        texts = {i: chat.ids[cut[i] :] for i, chat in chats.items()}
        return self._aligned({i: clips[name] for i, name in names.items()}, texts, alignment)

    def _aligned(
        self, clips: Mapping[int, ClipCache], texts: Mapping[int, list[int]], mark: int
    ) -> Float[Tensor, "n 3"]:
        """Return raw scores, one row per clip followed by its text."""
        rows: dict[int, Tensor] = {}
        for some in group_by_size(clips, lambda clip: clip.length):
            said = continue_clips(
                self.network, [clips[i] for i in some], [texts[i] for i in some], mark
            )
            for i, heads in zip(some, said, strict=True):
                quality = clips[i].heads.diagonal().to(heads.device)
                rows[i] = torch.cat([quality, heads[-1:]])
        return torch.stack([rows[i] for i in clips])

    def _constants(self) -> Float[Tensor, "2 3"]:
        """Return mean and standard deviation of each dimension."""
        if self.normalisation == "none":
            return torch.tensor([[0.0] * 3, [1.0] * 3])
        published = self.normalisation == "published"
        given = PUBLISHED if published else self.config.get("inference_config")
        if given is None:
            raise ValueError(
                f"{self.checkpoint}/model_config.json has no inference_config to normalise with; "
                "set normalisation to published or none"
            )
        return torch.tensor([[given[f"{dim}_{key}"] for dim in DIMS] for key in ("mean", "std")])

    def _chat(self, batch: MediaBatch, i: int) -> qwen2_vl.Chat:
        most = self.config["data_config"]["max_frame_pixels"]
        height, width = batch.media.shape[-2:]
        size = qwen2_vl.fit_size(height, width, FEWEST_PIXELS, most)
        frames = batch.media[i, self._chosen(batch, i)].to(self.place).float()
        cut = qwen2_vl.cut_patches(resize_rounding_once(frames, *size))
        text = INSTRUCTION.replace("{prompt}", batch.prompts[i])
        return qwen2_vl.build_chat(self.tokenizer, text, "video", cut)

    def _chosen(self, batch: MediaBatch, i: int) -> list[int]:
        fps = float(self.config["data_config"]["fps"])
        return at_rate(batch.media.shape[1], batch.fps[i], fps)


def _head(width: int) -> nn.Module:
    return nn.Linear(width, len(DIMS), bias=False)


def resize_rounding_once(
    frames: Float[Tensor, "T 3 H W"], height: int, width: int
) -> Float[Tensor, "T 3 height width"]:
    """Resize 8-bit frames bicubically, rounding once; the gradient is that of the smooth resize.

    The original resizes video with torchvision, which sums in floating point. PIL rounds twice.
    """
    smooth = resize(frames, height, width)
    bits = (frames.detach() * 255).round().clamp(0, 255)
    exact = resize(bits, height, width).round().clamp(0, 255) / 255
    return smooth + (exact - smooth).detach() if smooth.requires_grad else exact


_PEFT_NAMES = (
    (r"^base_model\.model\.", ""),
    (r"\.base_layer\.", "."),
    (r"(lora_[AB])\.default", r"\1"),
)
"""PEFT's additions to names, except for `lora_A` and `lora_B`."""
_VARIANTS = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save")
"""Settings of variants of LoRA with another formula than alpha / rank * B A."""


def read_step(folder: Path, base: str, lora: Mapping[str, Any]) -> tuple[Path, dict[str, Tensor]]:
    """Return the folder of the last step, and its weights under the base model's names."""
    steps = {int(p.name.split("-")[1]): p for p in folder.glob("checkpoint-*") if p.is_dir()}
    if not steps:
        raise ValueError(f"{folder} has no folder checkpoint-<step>")
    step = steps[max(steps)]
    files, file, rank = ["model.pth"], folder / "model_config.json", "lora_r"
    tensors: dict[str, Tensor] = {}
    if not (step / "model.pth").is_file():
        # The original applies them in this order: trained weights replace the base model's.
        files = ["non_lora_state_dict.pth", "adapter_model.safetensors"]
        file, rank = step / "adapter_config.json", "r"
        if missing := [name for name in (*files, file.name) if not (step / name).is_file()]:
            raise ValueError(f"{step} has neither model.pth nor {missing[0]}")
        lora, tensors = read_object(file), read_weights(base)
    if unknown := [key for key in _VARIANTS if lora.get(key)]:
        raise ValueError(f"{file}: {unknown[0]} is not supported")
    for name in files:
        tensors |= rename_tensors(read_tensors(step / name), _PEFT_NAMES)
    return step, merge_lora(tensors, lora[rank], float(lora["lora_alpha"]), step)


def merge_lora(
    tensors: Mapping[str, Tensor], rank: int, alpha: float, source: str | Path
) -> dict[str, Tensor]:
    """Replace every W that has a LoRA by W + alpha / rank * B A, and keep the rest unchanged.

    Raises:
        ValueError: A LoRA lacks its other half or its W, or has another rank or shape.
    """
    down = {k.split(".lora_A")[0]: v for k, v in tensors.items() if ".lora_A." in k}
    up = {k.split(".lora_B")[0]: v for k, v in tensors.items() if ".lora_B." in k}
    result = {k: v for k, v in tensors.items() if ".lora_" not in k}
    if odd := sorted(down.keys() ^ up.keys()):
        raise ValueError(f"{source}: the LoRA of {odd[0]} is not complete")
    for name, a in down.items():
        key, b = f"{name}.weight", up[name]
        if key not in result or result[key].shape != (len(b), a.shape[1]):
            raise ValueError(f"{source}: the LoRA of {name} has no weight of its shape")
        if a.shape[0] != rank or b.shape[1] != rank:
            raise ValueError(f"{source}: the LoRA of {name} is not of rank {rank}")
        weight = result[key]
        result[key] = (weight.float() + alpha / rank * (b.float() @ a.float())).to(weight.dtype)
    return result
