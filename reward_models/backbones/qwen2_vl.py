"""Builds Qwen2-VL, 2.5-VL or 3-VL as the backbone of a reward: native classes, a separate head.

Published rewards subclass the language model. Under transformers 5 these classes load no text
weights, and only a printed table reports it. Here the head is a separate module, and every key is
accounted for.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import override

from flowalign.types import MediaBatch, PositiveInt
from flowalign.utils.files import read_object
from reward_models.backbones.checkpoints import (
    find_file,
    load_exactly,
    on_meta_device,
    rename_tensors,
)
from reward_models.backbones.libraries import transformers
from reward_models.backbones.pixels import CLIP_MEAN, CLIP_STD, normalise
from reward_models.backbones.reward_bases import NetworkReward, Unscorable

PositionMode = Literal["sequential", "mrope"]
Dtype = Literal["float32", "bfloat16"]
PATCH, MERGE, PAIR = 14, 2, 2
"""Pixels per side of a patch, patches per side of a token, frames per patch."""
KEYS = (
    (r"^model\.(language_model|visual)\.", r"backbone.\1."),
    (r"^model\.", "backbone.language_model."),
    (r"^visual\.", "backbone.visual."),
    (r"^rm_heads?\.", "head."),
)
"""Maps key names of transformers 4, which wrote these checkpoints, to names in this module. The
language model is `model` in 4.45, and `model.language_model` in 4.52 and later."""
Kind = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
_CLASSES = {
    "qwen2_vl": ("Qwen2VLConfig", "Qwen2VLModel"),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", "Qwen2_5_VLModel"),
    "qwen3_vl": ("Qwen3VLConfig", "Qwen3VLModel"),
}
"""Names of the classes of configuration and model in transformers."""


@dataclass(frozen=True)
class Chat:
    """One user turn about one video, or about one or several images."""

    ids: list[int]
    patches: Float[Tensor, "N D"]
    grids: tuple[tuple[int, int, int], ...]
    """Numbers of frame pairs, patch rows and patch columns of the video or of each image."""


class Qwen2VLReward(nn.Module):
    """Qwen2-VL without its vocabulary head, with a reward head on the marked positions.

    VideoReward and HPSv3 were trained with positions that count tokens (`sequential`), because they
    pass their own embeddings to the language model. `mrope` is Qwen2-VL's scheme of three axes,
    which gives other scores.
    """

    def __init__(self, config: Any, head: nn.Module, position_mode: PositionMode):
        super().__init__()
        self.backbone: Any = getattr(transformers, _CLASSES[config.model_type][1])(config)
        self.head = head
        self.position_mode: PositionMode = position_mode
        self.pads = {"image": config.image_token_id, "video": config.video_token_id}

    def forward(
        self, chats: Sequence[Chat], marks: Sequence[int], modality: Literal["image", "video"]
    ) -> Float[Tensor, "n M *d"]:
        """Return the head's output at each of the M marks; every chat contains each mark once."""
        return self.head(self.hidden(chats, marks, modality))

    def hidden(
        self, chats: Sequence[Chat], marks: Sequence[int], modality: Literal["image", "video"]
    ) -> Float[Tensor, "n M D"]:
        """Return the last hidden state at each of the M marks, in float32.

        No mask is needed, because padding comes last, where causal attention does not see it.
        """
        device = next(self.parameters()).device
        rows = [torch.tensor(chat.ids) for chat in chats]
        ids = pad_sequence(rows, batch_first=True, padding_value=0).to(device)
        pixels, grid = f"pixel_values{'_videos' * (modality == 'video')}", f"{modality}_grid_thw"
        grids = [grid for chat in chats for grid in chat.grids]
        vision = {grid: torch.tensor(grids, device=device)}
        position_ids = self.positions(ids, modality, vision)
        vision[pixels] = torch.cat([chat.patches for chat in chats]).to(device)
        hidden = self.backbone(
            input_ids=ids, position_ids=position_ids, use_cache=False, **vision
        ).last_hidden_state
        return take_marks(hidden, ids, marks)

    def positions(
        self, ids: Int[Tensor, "n L"], modality: str, grid: Mapping[str, Tensor]
    ) -> Int[Tensor, "3 n L"]:
        """Return the positions of tokens on three axes; see `position_mode`."""
        if self.position_mode == "sequential":
            return torch.arange(ids.shape[1], device=ids.device).expand(3, *ids.shape)
        types = (ids == self.pads[modality]).int() * (1 if modality == "image" else 2)
        return self.backbone.get_rope_index(input_ids=ids, mm_token_type_ids=types, **grid)[0]


def take_marks(
    hidden: Float[Tensor, "n L D"], ids: Int[Tensor, "n L"], marks: Sequence[int]
) -> Float[Tensor, "n M D"]:
    """Return the hidden states at the first place of each mark in each row, in float32."""
    found = torch.stack([(ids == mark).int().argmax(1) for mark in marks], 1)
    return hidden.gather(1, found[..., None].expand(-1, -1, hidden.shape[2])).float()


def read_base(source: str, tokens: Sequence[str], kind: Kind = "qwen2_vl") -> tuple[Any, Any]:
    """Read the architecture and the tokenizer of a base model, and add special tokens.

    Raises:
        ValueError: The folder or hub repository lacks a file or holds another kind of model.
    """
    names = ("config.json", "tokenizer.json", "tokenizer_config.json")
    paths = [find_file(source, name) for name in names]
    if (found := read_object(paths[0]).get("model_type")) != kind:
        raise ValueError(f"{source} is of type {found!r}, not {kind}")
    folder = paths[0].parent
    config = getattr(transformers, _CLASSES[kind][0]).from_pretrained(folder)
    tokenizer = transformers.Qwen2Tokenizer.from_pretrained(folder)
    tokenizer.add_tokens(list(tokens), special_tokens=True)
    config.text_config.vocab_size = len(tokenizer)
    return config, tokenizer


def build_network(
    config: Any,
    head: Callable[[int], nn.Module],
    tensors: Mapping[str, Tensor],
    source: str | Path,
    position_mode: PositionMode = "sequential",
    dtype: Dtype = "float32",
) -> Qwen2VLReward:
    """Build the network with exactly these weights, named as in transformers 4.

    The head stays in float32.
    """
    with on_meta_device():
        network = Qwen2VLReward(config, head(config.text_config.hidden_size), position_mode)
    cast = {
        key: tensor.to(torch.float32 if key.startswith("head.") else getattr(torch, dtype))
        for key, tensor in rename_tensors(tensors, KEYS).items()
    }
    load_exactly(network, cast, source, unused=[r"lm_head\.weight"])
    return network


@dataclass(eq=False, repr=False)
class QwenReward(NetworkReward):
    """Reward that reads the hidden states of such a network in a chat about images."""

    _: KW_ONLY
    dtype: Dtype = "bfloat16"
    batch_size: PositiveInt = 8
    tokenizer: "transformers.Qwen2Tokenizer" = field(init=False)

    @override
    def examine(self, sample: MediaBatch) -> None:
        check_chat(self.tokenizer, sample.prompts[0], sample.media)


def check_chat(tokenizer: Any, prompt: str, *images: Float[Tensor, "... 3 _ _"]) -> None:
    """Check what a sample asks for.

    Raises:
        Unscorable: The prompt contains special tokens, which would change the question, or one
            side of an image is more than 200 times the other.
    """
    if found := [token for token in tokenizer.get_added_vocab() if token in prompt]:
        raise Unscorable(f"its prompt contains the special token {found[0]}")
    for image in images:
        fit_size(image.shape[-2], image.shape[-1], 1, 1)  # only for its check of the sides


def build_chat(
    tokenizer: Any,
    text: str,
    modality: Literal["image", "video"],
    *media: tuple[Float[Tensor, "_ D"], tuple[int, int, int]],
    system: str = "You are a helpful assistant.",
) -> Chat:
    """Return a user turn up to the answer: images or a video, cut by `cut_patches`, before text.

    Qwen3-VL has no default system prompt; an empty `system` leaves out its turn.
    """
    patches, grids = zip(*media, strict=True)
    seen = "".join(
        f"<|vision_start|>{f'<|{modality}_pad|>' * count_tokens(grid)}<|vision_end|>"
        for grid in grids
    )
    first = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    ids = tokenizer.encode(
        f"{first}<|im_start|>user\n{seen}{text}<|im_end|>\n<|im_start|>assistant\n"
    )
    return Chat(ids, torch.cat(patches), grids)


def fit_size(
    height: int, width: int, fewest: int, most: int, side: int = PATCH * MERGE
) -> tuple[int, int]:
    """Return height and width as multiples of a token's side, with an area within the bounds.

    The aspect ratio is kept as well as whole tokens allow. An image with a rounded area between
    `fewest` and `most` is only rounded. Otherwise it is scaled and rounded down to stay below
    `most`, or up to reach `fewest`.

    Raises:
        Unscorable: One side is more than 200 times the other.
    """
    if max(height, width) > 200 * min(height, width):
        raise Unscorable(f"{height}x{width} pixels: one side is over 200 times the other")
    h, w = (max(side, round(x / side) * side) for x in (height, width))
    if h * w > most:
        scale = math.sqrt(height * width / most)
        h, w = (math.floor(x / scale / side) * side for x in (height, width))
    elif h * w < fewest:
        scale = math.sqrt(fewest / (height * width))
        h, w = (math.ceil(x * scale / side) * side for x in (height, width))
    return h, w


def cut_patches(
    frames: Float[Tensor, "T 3 h w"],
    patch: int = PATCH,
    mean: Sequence[float] = CLIP_MEAN,
    std: Sequence[float] = CLIP_STD,
) -> tuple[Float[Tensor, "N D"], tuple[int, int, int]]:
    """Normalise fitted frames in [0, 1] and cut them into patches, grouped by token.

    An odd number of frames is extended by repeating the last frame.
    """
    x = normalise(frames, mean, std)
    x = torch.cat([x, x[-1:]]) if len(x) % PAIR else x
    grid = len(x) // PAIR, x.shape[2] // patch, x.shape[3] // patch
    t, h, w = grid
    x = x.reshape(t, PAIR, 3, h // MERGE, MERGE, patch, w // MERGE, MERGE, patch)
    return x.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, -1), grid


def count_tokens(grid: tuple[int, int, int]) -> int:
    """Return the number of text tokens that a grid of patches occupies."""
    return math.prod(grid) // MERGE**2
