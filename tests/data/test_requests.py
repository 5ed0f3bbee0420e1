"""Prompts come from files, and once from pipes and standard input."""

import io
import os
import sys
import threading
from pathlib import Path

import pytest

from flowalign.data.requests import read_requests, read_requests_once
from flowalign.types import prompts_of

TEXT, ROWS = "a cat\n\n  two dogs \n", '{"prompt": "a cat", "seed": 1}\n{"prompt": "two dogs"}\n'


def typed(monkeypatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="ascii"))


@pytest.mark.parametrize("text", [TEXT, ROWS], ids=["text", "jsonl"])
def test_standard_input_is_read_as_a_file_of_its_kind_would_be(monkeypatch, text):
    typed(monkeypatch, text.encode())
    assert prompts_of(read_requests_once("-")) == ["a cat", "two dogs"]


def test_standard_input_is_utf_8_wherever_it_comes_from(monkeypatch):
    typed(monkeypatch, "ein Bär\n".encode())
    assert prompts_of(read_requests_once("-")) == ["ein Bär"]
    typed(monkeypatch, b"\xe4\n")
    with pytest.raises(ValueError, match="'-' is not text in UTF-8"):
        read_requests_once("-")


def test_braces_that_are_no_row_are_a_prompt_and_a_bad_row_after_good_ones_is_named(monkeypatch):
    typed(monkeypatch, b"{red|blue} cat\nb\n")
    assert prompts_of(read_requests_once("-")) == ["{red|blue} cat", "b"]
    typed(monkeypatch, ROWS.encode() + b"third\n")
    with pytest.raises(ValueError, match=r"-:3: not JSON"):
        read_requests_once("-")


@pytest.mark.parametrize("where", ["/dev/fd/{}", "fifo"])
def test_a_pipe_is_read_once(tmp_path, where):
    """A process substitution of the shell is such a path."""
    if where == "fifo":
        path = str(tmp_path / "prompts")
        os.mkfifo(path)
        writer = threading.Thread(target=Path(path).write_text, args=(TEXT,))
        writer.start()
        assert prompts_of(read_requests_once(path)) == ["a cat", "two dogs"]
        writer.join()
        return
    read, write = os.pipe()
    os.write(write, TEXT.encode())
    os.close(write)
    assert prompts_of(read_requests_once(where.format(read))) == ["a cat", "two dogs"]
    os.close(read)


def test_an_empty_stream_holds_no_prompt(monkeypatch):
    typed(monkeypatch, b"\n \n")
    with pytest.raises(ValueError, match="'-' holds no prompt"):
        read_requests_once("-")


def test_files_are_read_alike_and_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path):
    (tmp_path / "p.txt").write_text(f"\ufeff{TEXT}", encoding="utf-8")
    (tmp_path / "p.jsonl").write_text(ROWS)
    for name in ("p.txt", "p.jsonl"):
        path = str(tmp_path / name)
        assert (
            prompts_of(read_requests_once(path))
            == prompts_of(read_requests(path))
            == ["a cat", "two dogs"]
        )
    with pytest.raises(ValueError, match="does not exist"):
        read_requests_once(str(tmp_path))


def test_what_reads_prompts_again_and_again_takes_no_pipe(tmp_path):
    os.mkfifo(tmp_path / "prompts")
    with pytest.raises(ValueError, match="is a pipe, which can be read once only"):
        read_requests(str(tmp_path / "prompts"))
