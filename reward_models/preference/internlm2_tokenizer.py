"""Converts InternLM2's sentencepiece tokenizer to a fast tokenizer, which MJ-VIDEO's reader needs.

The release has `tokenizer.model` and code for transformers 4. The merges of byte-pair encoding
follow from the scores of the pieces, so neither sentencepiece nor protobuf is needed.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from flowalign.utils.files import read_object
from reward_models.backbones.checkpoints import find_file
from reward_models.backbones.libraries import transformers

_NORMAL = 1
"""Type of the pieces that merges make; the other types are control tokens and single bytes."""
_SPACE = "\u2581"
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
"""Wire types of protocol buffers."""


@dataclass(frozen=True)
class Piece:
    """Piece of a sentencepiece model."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class SentencePieceModel:
    """Pieces of a sentencepiece model, by id, and its treatment of the start of a text."""

    pieces: Sequence[Piece]
    adds_prefix: bool
    """Whether texts begin with an added space."""


def read_model(path: Path) -> SentencePieceModel:
    """Read a `tokenizer.model`; raise ValueError if it is no sentencepiece model."""
    pieces, adds_prefix = [], True  # the default of sentencepiece
    try:
        for number, value in _read_fields(path.read_bytes()):
            if number == 1:
                pieces.append(_read_piece(value))
            elif number == 3:
                adds_prefix = bool(dict(_read_fields(value)).get(3, True))
    except (IndexError, struct.error, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no sentencepiece model: {error}") from error
    if not pieces:
        raise ValueError(f"{path} is no sentencepiece model: it has no pieces")
    return SentencePieceModel(pieces, adds_prefix)


def _read_piece(data: bytes) -> Piece:
    fields = dict(_read_fields(data))
    (score,) = struct.unpack("<f", fields.get(2, bytes(4)))
    return Piece(fields[1].decode(), score, fields.get(3, _NORMAL))


def _read_fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield numbers and values of the fields of a protocol buffer: integers or bytes."""
    place = 0
    while place < len(data):
        key, place = _read_varint(data, place)
        kind = key & 7
        if kind == _VARINT:
            value, place = _read_varint(data, place)
        else:
            sizes = {_FIXED64: 8, _FIXED32: 4}
            size, place = _read_varint(data, place) if kind == _LENGTH else (sizes[kind], place)
            value, place = data[place : place + size], place + size
        yield key >> 3, value


def _read_varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value, shift, place = value | (byte & 127) << shift, shift + 7, place + 1
        if byte < 128:
            return value, place


def list_merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the pairs of pieces that merge to a piece, the highest score first."""
    found = [
        (-score, -k, k - len(text), text[:k], text[k:])
        for text, score in scores.items()
        for k in range(1, len(text))
        if text[:k] in scores and text[k:] in scores
    ]
    return [(left, right) for *_, left, right in sorted(found, key=lambda one: one[:3])]


def build_tokenizer(model: SentencePieceModel, added: Mapping[int, str]) -> Tokenizer:
    """Return a fast tokenizer; `added` are the special tokens by id, which may rename pieces."""
    names = {**{i: piece.text for i, piece in enumerate(model.pieces)}, **added}
    scores = {
        piece.text: piece.score
        for i, piece in enumerate(model.pieces)
        if piece.kind == _NORMAL and i not in added
    }
    vocab = {names[i]: i for i in range(len(model.pieces))}
    bpe = BPE(vocab, list_merges(scores), unk_token=names[0], fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    prefix = [normalizers.Prepend(_SPACE)] if model.adds_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if model.adds_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    special = [AddedToken(added[i], normalized=False, special=True) for i in sorted(added)]
    tokenizer.add_special_tokens(special)
    moved = {name: tokenizer.token_to_id(name) for name in added.values()}
    if moved != {name: i for i, name in added.items()}:
        raise ValueError(f"special tokens get other ids than in the release: {moved}")
    return tokenizer


def convert_tokenizer(source: str) -> Any:
    """Return the tokenizer of a folder or hub repository, in the form of transformers.

    Raises:
        ValueError: A file is missing or damaged.
    """
    config = read_object(find_file(source, "tokenizer_config.json"))
    known = config.get("added_tokens_decoder")
    if not isinstance(known, dict):
        raise ValueError(f"tokenizer_config.json of {source} has no added_tokens_decoder")
    added = {int(i): str(token["content"]) for i, token in known.items()}
    tokenizer = build_tokenizer(read_model(find_file(source, "tokenizer.model")), added)
    named = {name: config[name] for name in ("bos_token", "eos_token", "unk_token")}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
