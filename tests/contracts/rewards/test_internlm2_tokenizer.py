"""InternLM2's sentencepiece tokenizer, converted without sentencepiece."""

import json
import struct

import pytest

from reward_models.preference import internvl2
from reward_models.preference.internlm2_tokenizer import list_merges, read_model
from reward_models.preference.internvl2 import read_tokenizer

PIECES = [
    *(("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)),
    *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)),
    *(("\u2581", -5.0, 1), ("a", -6.0, 1), ("b", -7.0, 1), ("\n", -8.0, 1)),
    *(("ab", -1.0, 1), ("abab", -2.0, 1), ("ba", -0.5, 1), ("[UNUSED]", -9.0, 1)),
]
ID = {text: i for i, (text, _, _) in enumerate(PIECES)}
SPECIAL = ["<unk>", "<s>", "</s>"]
ADDED = dict(enumerate(SPECIAL)) | {ID["[UNUSED]"]: "<|im_end|>", len(PIECES): "<|im_start|>"}


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _varint(value >> 7)


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _model(adds_prefix: bool) -> bytes:
    """Write the fields of a sentencepiece model that the reader needs, and one that it skips."""
    pieces = [
        _field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + b"\x18" + _varint(kind)
        for text, score, kind in PIECES
    ]
    normalizer = _field(1, b"identity") + b"\x18" + _varint(adds_prefix)
    return (
        b"".join(_field(1, piece) for piece in pieces)
        + _field(2, b"\x18\x02")
        + _field(3, normalizer)
    )


@pytest.fixture
def release(tmp_path, monkeypatch):
    monkeypatch.setattr(internvl2, "TURN", _turn())
    (tmp_path / "tokenizer.model").write_bytes(_model(False))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config["added_tokens_decoder"] = {str(i): {"content": name} for i, name in ADDED.items()}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def _turn() -> tuple[int, ...]:
    letters = [ID["a"] if one == "a" else 3 + ord(one) for one in "assistant"]
    return (ID["[UNUSED]"], len(PIECES), *letters, ID["\n"])


def test_texts_get_the_ids_that_sentencepiece_gives_them(release):
    tokenizer = read_tokenizer(str(release))
    text = "abab<|im_end|> \u00e9"
    # ba has the best score, so it merges before ab
    wanted = [ID["a"], ID["ba"], ID["b"], ID["[UNUSED]"], ID["\u2581"], 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.encode(text, add_special_tokens=False) == wanted
    assert tokenizer.decode(wanted) == text
    assert tokenizer.bos_token_id == 1
    assert set(tokenizer.get_added_vocab()) == set(ADDED.values())


def test_pieces_merge_in_the_order_of_their_scores():
    scores = {"a": -9.0, "b": -9.0, "ab": -1.0, "abab": -2.0, "aba": -2.5}
    assert list_merges(scores) == [("a", "b"), ("aba", "b"), ("ab", "ab"), ("ab", "a")]


def test_a_prefix_is_read_from_the_file(tmp_path):
    for adds in (False, True):
        (tmp_path / "tokenizer.model").write_bytes(_model(adds))
        assert read_model(tmp_path / "tokenizer.model").normalizer_spec.add_dummy_prefix == adds


def test_other_files_and_tokens_are_refused(release, monkeypatch):
    monkeypatch.setattr(internvl2, "TURN", (1, 2))
    with pytest.raises(ValueError, match="encodes the end of a turn as"):
        read_tokenizer(str(release))
    (release / "tokenizer.model").write_bytes(b"\x0a\xff")
    with pytest.raises(ValueError, match="is no sentencepiece model"):
        read_tokenizer(str(release))
    (release / "tokenizer.model").unlink()
    with pytest.raises(ValueError, match=r"nor a folder with tokenizer\.model"):
        read_tokenizer(str(release))
