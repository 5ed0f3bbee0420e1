"""Reads CLIP models, an image tower and a text tower, in Hugging Face's or open_clip's format."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from flowalign.types import MediaBatch
from flowalign.utils.errors import explain_errors, require_known
from flowalign.utils.files import bundled, read_object
from reward_models.backbones.checkpoints import (
    find_file,
    find_folder,
    load_exactly,
    on_meta_device,
    read_tensors,
    read_weights,
    to_float32,
)
from reward_models.backbones.libraries import open_clip, transformers
from reward_models.backbones.pixels import (
    CLIP_MEAN,
    CLIP_STD,
    crop_shortest_side,
    normalise,
    pad_longest_side,
    resize,
)

DESCRIPTIONS = ("*.json", "*.txt", "*.model")
"""Patterns of repository files other than weights."""
UNUSED = (r".*position_ids",)
"""Keys in older checkpoints that hold position indices 0, 1, 2, ... instead of weights."""


@dataclass(frozen=True)
class Preprocessing:
    """Preprocessing of a tower, from RGB images in [0, 1]."""

    size: int
    resize: Literal["shortest", "longest", "squash"] = "shortest"
    """Resize mode. `shortest` resizes the shortest side and crops, `longest` resizes the longest
    side and pads with black, `squash` resizes both sides."""
    mean: Sequence[float] = CLIP_MEAN
    std: Sequence[float] = CLIP_STD
    floors: bool = False
    """Whether an odd crop margin is rounded as in transformers, see `crop_shortest_side`."""

    def __call__(self, frames: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n 3 size size"]:
        """Resize images with PIL's arithmetic (except for `longest`), and normalise them."""
        if self.resize == "longest":
            frames = pad_longest_side(frames, self.size)
        elif self.resize == "shortest":
            frames = crop_shortest_side(frames, self.size, quantised=True, floors=self.floors)
        else:
            frames = resize(frames, self.size, self.size, quantised=True)
        return normalise(frames, self.mean, self.std)


def guide_text(
    text: Float[Tensor, "n d"], shift: Float[Tensor, "d"], strength: float
) -> Float[Tensor, "n d"]:
    """Return e- + strength (e+ - e-) with e+ and e- = normalize(text + shift), (text - shift).

    The result has no unit length. Without a shift it is the normalised text.

    Source: D2-Align, arXiv:2512.24146.
    """
    plus, minus = F.normalize(text + shift, dim=-1), F.normalize(text - shift, dim=-1)
    return minus + strength * (plus - minus)


class Towers(nn.Module, ABC):
    """Image tower and text tower that embed images and prompts in one space."""

    shift: Tensor | None = None
    """Learned shift of text embeddings (`D2Align`); None: none."""
    strength: float = 1.0
    """Strength of the shift."""

    def __init__(self, model: Any, tokenizer: Any, preprocessing: Preprocessing):
        super().__init__()
        self.model: Any = model
        self.tokenizer, self.preprocessing = tokenizer, preprocessing

    @abstractmethod
    def encode_pixels(self, pixels: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n d"]:
        """Embed preprocessed images, without normalisation."""

    @abstractmethod
    def encode_prompts(self, prompts: Sequence[str]) -> Float[Tensor, "n d"]:
        """Embed prompts, without normalisation."""

    def images(self, frames: Float[Tensor, "n 3 h w"], at_once: int) -> Float[Tensor, "n d"]:
        """Embed frames in [0, 1] to length 1, `at_once` frames at a time."""
        frames = frames.to(self.scale.device, torch.float32)
        parts = [self.encode_pixels(self.preprocessing(part)) for part in frames.split(at_once)]
        return F.normalize(torch.cat(parts), dim=-1)

    def texts(self, prompts: Sequence[str]) -> Float[Tensor, "n d"]:
        """Embed prompts to length 1; each distinct prompt is computed once, without a gradient.

        A shift changes the length.
        """
        distinct = list(dict.fromkeys(prompts))
        with torch.no_grad():
            embedded = F.normalize(self.encode_prompts(distinct), dim=-1)
            if self.shift is not None:
                embedded = guide_text(embedded, self.shift.to(embedded), self.strength)
        return embedded[[distinct.index(prompt) for prompt in prompts]]

    @property
    def scale(self) -> Float[Tensor, ""]:
        """Return exp(logit_scale), the factor that the towers were trained with."""
        return self.model.logit_scale.exp().squeeze()


class HuggingFaceTowers(Towers):
    """`CLIPModel` or `SiglipModel` with its tokenizer."""

    def encode_pixels(self, pixels: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n d"]:
        """Return the projected image embedding (SigLIP: the attention-pooled one)."""
        return self.model.get_image_features(pixel_values=pixels).pooler_output

    def encode_prompts(self, prompts: Sequence[str]) -> Float[Tensor, "n d"]:
        """Return the projected text embedding; prompts that are too long are truncated.

        Padding is not masked: CLIP's text attention is causal and SigLIP was trained without a
        mask.
        """
        length = self.model.config.text_config.max_position_embeddings
        tokens = self.tokenizer(
            list(prompts),
            padding="max_length",
            truncation=True,
            max_length=length,
            return_tensors="pt",
        )
        ids = tokens["input_ids"].to(self.scale.device)
        return self.model.get_text_features(input_ids=ids).pooler_output


class OpenClipTowers(Towers):
    """Model of open_clip with its tokenizer."""

    def encode_pixels(self, pixels: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n d"]:
        """Return the projected image embedding."""
        return self.model.encode_image(pixels)

    def encode_prompts(self, prompts: Sequence[str]) -> Float[Tensor, "n d"]:
        """Return the projected text embedding; prompts that are too long are truncated."""
        return self.model.encode_text(self.tokenizer(list(prompts)).to(self.scale.device))


def prompt_similarity(towers: Towers, batch: MediaBatch, at_once: int) -> Float[Tensor, "n"]:
    """Return the cosine similarity of every sample with its prompt, averaged over its frames."""
    images = towers.images(batch.media.flatten(0, 1), at_once)
    images = images.unflatten(0, batch.media.shape[:2])
    return (images * towers.texts(batch.prompts)[:, None]).sum(-1).mean(1)


def read_hugging_face(source: str, processor: str | None = None) -> HuggingFaceTowers:
    """Read the CLIP or SigLIP model in a local folder or hub repository.

    If `processor`, another folder or repository, is set, tokenizer and preprocessing come from it.
    """
    kinds = {"clip": "CLIP", "siglip": "Siglip"}
    folder = find_folder(source, DESCRIPTIONS)
    config = read_object(find_file(str(folder), "config.json"))
    require_known(
        f"{source} must hold a model of a known type, not", [str(config.get("model_type"))], kinds
    )
    described = find_folder(processor, DESCRIPTIONS) if processor else folder
    preprocessing = _preprocessing(find_file(str(described), "preprocessor_config.json"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(described, local_files_only=True)
    kind = kinds[config["model_type"]]
    make_config = getattr(transformers, f"{kind}Config")
    with on_meta_device():
        model = getattr(transformers, f"{kind}Model")(make_config.from_dict(config))
    load_exactly(model, to_float32(read_weights(source)), source, unused=UNUSED)
    return HuggingFaceTowers(model, tokenizer, preprocessing)


def read_open_clip(model: str, pretrained: str) -> OpenClipTowers:
    """Read an open_clip model, given its weights and its architecture or a JSON file of sizes.

    `pretrained` is a checkpoint file or, for an architecture of open_clip, one of its tags.
    """
    if (model, pretrained) in open_clip.list_pretrained():
        return _read_published(model, pretrained)
    weights = find_file(pretrained)
    content = _sizes(model)
    sizes = content.get("model_cfg", content)
    make = open_clip.CustomTextCLIP if sizes.pop("custom_text", False) else open_clip.CLIP
    text = sizes["text_cfg"]
    if "hf_model_name" in text or "timm_model_name" in sizes["vision_cfg"]:
        raise ValueError(f"{model}: local files must use open_clip's own towers, not hf or timm")
    with on_meta_device():
        network = make(**sizes)
    load_exactly(network, to_float32(read_tensors(weights)), weights)
    tokenizer = open_clip.tokenizer.SimpleTokenizer(context_length=text.get("context_length", 77))
    described = {"size": network.visual.image_size, **content.get("preprocess_cfg", {})}
    return OpenClipTowers(network, tokenizer, _open_clip_preprocessing(described))


def read_towers(model: str, pretrained: str | None) -> Towers:
    """Read a model of open_clip or, without `pretrained`, a folder or Hugging Face repository."""
    if pretrained is not None:
        return read_open_clip(model, pretrained)
    own = (Path(bundled(model)) / "open_clip_config.json").exists()
    return read_open_clip_folder(model) if own else read_hugging_face(model)


def read_open_clip_folder(folder: str) -> OpenClipTowers:
    """Read an open_clip model in a folder with its config, safetensors and tokenizer."""
    config = find_file(folder, "open_clip_config.json")
    towers = read_open_clip(str(config), str(find_file(folder, "open_clip_model.safetensors")))
    if "hf_tokenizer_name" in read_object(config)["model_cfg"]["text_cfg"]:
        towers.tokenizer = open_clip.get_tokenizer(f"local-dir:{config.parent}")
    return towers


def _read_published(model: str, tag: str) -> OpenClipTowers:
    """Load weights that open_clip downloads and loads strictly itself.

    If the weights were trained with another activation than the architecture's, open_clip only
    warns. This function therefore sets the activation of the weights.
    """
    quick = open_clip.get_pretrained_cfg(model, tag).get("quick_gelu", False)
    with explain_errors(f"open_clip cannot load {model} {tag}", RuntimeError, OSError):
        network = open_clip.create_model(model, tag, force_quick_gelu=quick)
    described = open_clip.get_model_preprocess_cfg(network)
    tokenizer = open_clip.get_tokenizer(model)
    return OpenClipTowers(network, tokenizer, _open_clip_preprocessing(described))


def _sizes(model: str) -> dict[str, Any]:
    if model.endswith(".json"):
        return read_object(find_file(model))
    config = open_clip.get_model_config(model)
    if config is None:
        raise ValueError(f"model {model!r} is neither an architecture of open_clip nor a JSON file")
    return config


def _open_clip_preprocessing(config: Mapping[str, Any]) -> Preprocessing:
    resize, kind = config.get("resize_mode", "shortest"), config.get("interpolation", "bicubic")
    size = config["size"]
    height, width = size[-2:] if isinstance(size, Sequence) else (size, size)
    if height != width or kind != "bicubic":
        raise ValueError(f"preprocessing {size} {kind} is not supported; expected square, bicubic")
    mean, std = config.get("mean", CLIP_MEAN), config.get("std", CLIP_STD)
    return Preprocessing(height, resize, tuple(mean), tuple(std))


def _preprocessing(path: Path) -> Preprocessing:
    """Read the preprocessing that a `preprocessor_config.json` describes."""
    config = read_object(path)
    size, crops = config.get("size"), config.get("do_center_crop", False)
    squash = isinstance(size, dict) and "height" in size
    sides = _sides(size) | (_sides(config.get("crop_size")) if crops else set())
    if len(sides) != 1 or None in sides or squash == crops or config.get("resample") != 3:
        raise ValueError(f"{path}: only a bicubic resize to one square size is supported")
    mean, std = config.get("image_mean", CLIP_MEAN), config.get("image_std", CLIP_STD)
    resize = "squash" if squash else "shortest"
    return Preprocessing(sides.pop(), resize, tuple(mean), tuple(std), floors=True)


def _sides(size: Any) -> set[Any]:
    return set(size.values()) if isinstance(size, dict) else {size}
