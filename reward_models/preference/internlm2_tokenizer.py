"""Converts InternLM2's sentencepiece tokenizer to a fast tokenizer, which MJ-VIDEO's reader needs.

The release has `tokenizer.model` and code for transformers 4. The merges of byte-pair encoding
follow from the scores of the pieces, so sentencepiece is not needed.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from flowalign.utils.errors import explain_errors
from flowalign.utils.files import read_object
from flowalign.utils.imports import import_optional
from reward_models.backbones.checkpoints import find_file
from reward_models.backbones.libraries import transformers

_NORMAL = 1
"""Type of the pieces that merges make; the other types are control tokens and single bytes."""
_SPACE = "\u2581"


def read_model(path: Path) -> Any:
    """Read a `tokenizer.model` as a message; raise ValueError if it is no sentencepiece model."""
    protobuf = import_optional("google.protobuf.message", "sentencepiece")
    proto = import_module("transformers.convert_slow_tokenizer").import_protobuf()
    with explain_errors(f"{path} is no sentencepiece model", protobuf.DecodeError):
        model = proto.ModelProto.FromString(path.read_bytes())
    if not model.pieces:
        raise ValueError(f"{path} is no sentencepiece model: it has no pieces")
    return model


def list_merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the pairs of pieces that merge to a piece, the highest score first."""
    found = [
        (-score, -k, k - len(text), text[:k], text[k:])
        for text, score in scores.items()
        for k in range(1, len(text))
        if text[:k] in scores and text[k:] in scores
    ]
    return [(left, right) for *_, left, right in sorted(found, key=lambda one: one[:3])]


def build_tokenizer(model: Any, added: Mapping[int, str]) -> Tokenizer:
    """Return a fast tokenizer; `added` are the special tokens by id, which may rename pieces."""
    names = {**{i: one.piece for i, one in enumerate(model.pieces)}, **added}
    scores = {
        one.piece: one.score
        for i, one in enumerate(model.pieces)
        if one.type == _NORMAL and i not in added
    }
    vocab = {names[i]: i for i in range(len(model.pieces))}
    bpe = BPE(vocab, list_merges(scores), unk_token=names[0], fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    prefix = [normalizers.Prepend(_SPACE)] if model.normalizer_spec.add_dummy_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if model.normalizer_spec.add_dummy_prefix else []
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
