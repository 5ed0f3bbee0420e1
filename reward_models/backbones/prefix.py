"""Reads a clip or image once, and continues with every prompt or question that follows.

A clip's keys and values are cached for prompts. Questions about one sample are packed into a row:
the prefix is prefilled once, and a mask shows each question only the prefix and itself. Results
equal separate questions to 1e-5 on three architectures, for images and videos, without copies or
padding (`assets/bench/checklist_prefix.py`). It needs attention with masks: SDPA or eager.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from reward_models.backbones.libraries import name_cache, transformers
from reward_models.backbones.qwen2_vl import Chat, Qwen2VLReward, take_marks


def find_answer_tokens(tokenizer: Any, word: str, canonical: bool = True) -> list[int]:
    """Return the tokens for the word, in any spelling or only capitalised (`canonical` false).

    Raises:
        ValueError: No spelling is a single token.
    """
    spellings = [word, word.capitalize(), word.upper()] if canonical else [word.capitalize()]
    spellings += [f" {spelling}" for spelling in spellings] if canonical else []
    return find_single_tokens(tokenizer, spellings)


def find_single_tokens(tokenizer: Any, spellings: Sequence[str]) -> list[int]:
    """Return the distinct tokens that equal one of the spellings.

    Raises:
        ValueError: No spelling is a single token.
    """
    encoded = [tokenizer.encode(spelling, add_special_tokens=False) for spelling in spellings]
    single = sorted({tokens[0] for tokens in encoded if len(tokens) == 1})
    if not single:
        raise ValueError(f"the tokenizer has no single token for any of {list(spellings)}")
    return single


@dataclass(frozen=True)
class PackedQuestions:
    """Questions of each sample, concatenated into a row of T tokens."""

    tokens: Int[Tensor, "n T"]
    owner: Int[Tensor, "n T"]
    """Index of the question that a token belongs to; -1 is padding."""
    offset: Int[Tensor, "n T"]
    """Distance of a token from the first token of its question."""
    last: Int[Tensor, "n places"]
    """Indices of the tokens whose successor is wanted: each question's last one, or all."""

    def mask(self, prefix: int) -> Bool[Tensor, "n 1 T L"]:
        """Return the attention mask: the whole prefix, and the same question up to the token."""
        own = (self.owner[:, :, None] == self.owner[:, None, :]).tril()
        return torch.cat([own.new_ones(*own.shape[:2], prefix), own], dim=2)[:, None]

    def to(self, device: torch.device) -> "PackedQuestions":
        """Return a copy on another device."""
        return PackedQuestions(*(part.to(device) for part in vars(self).values()))


def pack_questions(questions: Sequence[Sequence[Sequence[int]]]) -> PackedQuestions:
    """Pack the tokens of every question of every sample, padding shorter rows on the right."""

    def padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
        return pad_sequence([torch.tensor(r) for r in rows], True, value)

    lengths = torch.tensor([[len(question) for question in row] for row in questions])
    tokens = [[token for question in row for token in question] for row in questions]
    owner = [[i for i, question in enumerate(row) for _ in question] for row in questions]
    offset = [[k for question in row for k in range(len(question))] for row in questions]
    return PackedQuestions(
        padded(tokens, 0), padded(owner, -1), padded(offset, 0), lengths.cumsum(1) - 1
    )


def pack_texts(texts: Sequence[Sequence[Sequence[int]]]) -> PackedQuestions:
    """Pack one text per sample, and want the successor of every token."""
    packed = pack_questions(texts)
    every = torch.arange(packed.tokens.shape[1]).expand_as(packed.tokens)
    return replace(packed, last=every)


K = TypeVar("K")
V = TypeVar("V")
Layer = tuple[Float[Tensor, "n heads L D"], Float[Tensor, "n heads L D"]]
"""Keys and values of one layer."""


@dataclass(frozen=True)
class ClipCache:
    """Keys, values and head outputs of a network for a clip and the text after it."""

    heads: Float[Tensor, "M d"]
    """Output of the head at each of M marks."""
    layers: Sequence[Layer]
    """Keys and values of every layer, for this clip only."""
    last: Int[Tensor, "3 1"]
    """Position of the last token on three axes. The token is text, so the next position is one
    more."""

    @property
    def length(self) -> int:
        """Return the length in tokens."""
        return self.layers[0][0].shape[2]

    def to(self, device: torch.device | str) -> "ClipCache":
        """Return a copy on another device."""
        layers = [(k.to(device), v.to(device)) for k, v in self.layers]
        return ClipCache(self.heads.to(device), layers, self.last.to(device))


def read_clips(
    network: Qwen2VLReward, chats: Sequence[Chat], marks: Sequence[int]
) -> list[ClipCache]:
    """Read chats of equal length about a video, and return keys, values and head outputs."""
    device = next(network.parameters()).device
    ids = torch.tensor([chat.ids for chat in chats], device=device)
    grid = {"video_grid_thw": torch.tensor([chat.grids[0] for chat in chats], device=device)}
    positions = network.positions(ids, "video", grid)
    seen = network.backbone(
        input_ids=ids,
        position_ids=positions,
        use_cache=True,
        pixel_values_videos=torch.cat([chat.patches for chat in chats]).to(device),
        **grid,
    )
    heads = network.head(take_marks(seen.last_hidden_state, ids, marks))
    layers = [(layer.keys, layer.values) for layer in seen[name_cache()].layers]
    return [
        ClipCache(heads[i], [(k[i : i + 1], v[i : i + 1]) for k, v in layers], positions[:, i, -1:])
        for i in range(len(chats))
    ]


def continue_clips(
    network: Qwen2VLReward, clips: Sequence[ClipCache], texts: Sequence[Sequence[int]], mark: int
) -> Float[Tensor, "n d"]:
    """Return the head's output at the mark in the text after each clip, for clips of equal length.

    Padding comes last, where causal attention does not see it.
    """
    device = next(network.parameters()).device
    ids = pad_sequence([torch.tensor(text) for text in texts], batch_first=True).to(device)
    clips = [clip.to(device) for clip in clips]
    layers = [
        (torch.cat([k for k, _ in same]), torch.cat([v for _, v in same]))
        for same in zip(*(clip.layers for clip in clips), strict=True)
    ]
    start = torch.stack([clip.last for clip in clips], 1) + 1
    seen = network.backbone(
        input_ids=ids,
        position_ids=start + torch.arange(ids.shape[1], device=device),
        use_cache=True,
        **{name_cache(): transformers.DynamicCache(layers)},
    )
    return network.head(take_marks(seen.last_hidden_state, ids, [mark])[:, 0])


def hash_clip(chat: Chat) -> str:
    """Return a digest that is equal for chats about equal clips."""
    content = chat.patches.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return f"{chat.grids} {hashlib.sha256(content.data).hexdigest()}"


def group_by_size(items: Mapping[K, V], size: Callable[[V], int]) -> list[list[K]]:
    """Group the keys by the size of their items; sizes stay in order of first appearance."""
    groups: dict[int, list[K]] = defaultdict(list)
    for key, item in items.items():
        groups[size(item)].append(key)
    return [*groups.values()]
