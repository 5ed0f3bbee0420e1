"""Damaged and ambiguous tables are refused, or their bad rows are named and the others read."""

import json
from datetime import datetime
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from flowalign.data import open_dataset

TWO_LISTS = {"train": [{"prompt": "a", "image": "a.png"}], "test": [{"prompt": "b"}]}
REFUSED = {
    "open quote at the end": (
        "q.csv",
        'prompt,image\na,a.png\nb,"a.png\n',
        "line 3 has a wrong quote",
    ),
    "open quote inside": ("q.csv", 'prompt,image\n"b,a.png\nc,a.png\nd,"a.png\n', "wrong quote"),
    "quoted first word": ("q.csv", 'prompt,image\n"HELLO" on a sign,a.png\n', "line 2 has a wrong"),
    "repeated column": (
        "q.csv",
        "prompt,image,prompt\na,a.png,b\n",
        "several columns named prompt",
    ),
    "other encoding": ("q.csv", b"prompt,image\ncaf\xe9,a.png\n", r"q\.csv' is not text in UTF-8"),
    "other encoding of JSON": ("q.json", b'[{"image": "\xe9"}]', r"q\.json' is not text in UTF-8"),
    "second list": ("q.json", json.dumps(TWO_LISTS), "also holds test; put each list in its own"),
    "trailing list": (
        "q.json",
        '[{"image": "a"}] [{"image": "b"}]',
        r"more after its list of rows: '\[",
    ),
    "trailing text": ("q.json", '{"rows": [{"image": "a"}]} x', "more after its list"),
    "empty table": ("q.csv", "prompt,image\n", "holds no row"),
    "empty file": ("q.jsonl", "", "holds no row"),
}


@pytest.mark.parametrize(("name", "content", "said"), REFUSED.values(), ids=REFUSED)
def test_an_ambiguous_table_is_refused(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=said):
        list(open_dataset(str(tmp_path / name)))


READ = {
    "byte order mark": ("q.csv", "\ufeffprompt,image\na,a.png\n"),
    "index of pandas": ("q.csv", ",prompt,image\n0,a,a.png\n"),
    "quotes inside": ("q.csv", 'prompt,image\n"a",a.png\n'),
    "values around the list": ("q.json", '{"rows": [{"prompt": "a", "image": "a.png"}], "n": 1}'),
}


@pytest.mark.parametrize(("name", "content"), READ.values(), ids=READ)
def test_a_table_of_common_programs_is_read(tmp_path, name, content):
    (tmp_path / name).write_text(content, encoding="utf-8")
    (record,) = open_dataset(str(tmp_path / name))
    assert (record.prompt, record.problem, dict(record.metadata)) == ("a", "", {})


BAD_ROWS = {
    "half of a character": ('{"prompt": "\\ud83d", "image": "a.png"}', "half of a character"),
    "deep nesting": ("[" * 100_000, "is not JSON"),
    "inline data": (
        json.dumps({"image": "data:image/png;base64," + "A" * 5000}),
        r"image is inline data or a long text \(data:image/png.{16}\.\.\.\); give bytes",
    ),
    "long text": (json.dumps({"image": "A" * 300}), "image is inline data or a long text"),
}


@pytest.mark.parametrize(("row", "said"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_does_not_end_the_job(tmp_path, row, said):
    good = '{"prompt": "\\ud83d\\ude00", "image": "a.png"}'
    (tmp_path / "q.jsonl").write_text("\n".join([good, row, good]))
    first, bad, last = open_dataset(str(tmp_path / "q.jsonl"))
    assert first.prompt == last.prompt == "\U0001f600"
    assert bad.problem.startswith("invalid row: q.jsonl row 2: ")
    with pytest.raises(ValueError, match=said):
        raise ValueError(bad.problem)


def test_a_bad_value_of_a_parquet_file_is_a_bad_row_and_times_are_not_read(tmp_path):
    broken = pyarrow.array([b"a", b"\xff", b"c"]).view(pyarrow.string())
    late = pyarrow.array([253402300800000000] * 3, pyarrow.timestamp("us"))
    table = pyarrow.table({"prompt": broken, "image": ["a.png"] * 3, "made": late})
    parquet.write_table(table, tmp_path / "q.parquet")
    first, bad, last = open_dataset(str(tmp_path / "q.parquet"))
    assert (first.prompt, last.prompt, dict(first.metadata)) == ("a", "c", {})
    assert bad.problem.startswith("invalid row: q.parquet row 2: holds text that is not UTF-8")
    rows = [{"image": "a.png", "made": datetime(2026, 1, 1)}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "q.parquet")
    assert [dict(record.metadata) for record in open_dataset(str(tmp_path / "q.parquet"))] == [{}]


def test_captions_are_read_in_the_encodings_of_windows_and_others_are_named(tmp_path):
    for name in "abcd":
        (tmp_path / f"{name}.png").write_bytes(b"x")
    captions = {"a": b"\xef\xbb\xbfa cat", "b": "a cat".encode("utf-16"), "c": b"caf\xe9"}
    for name, caption in captions.items():
        (tmp_path / f"{name}.txt").write_bytes(caption)
    records = list(open_dataset(str(tmp_path)))
    assert [record.prompt for record in records] == ["a cat", "a cat", "", ""]
    assert "(c.png) has a prompt that is no text" in records[2].problem


def test_hidden_files_are_no_part_of_a_folder(tmp_path):
    for name in ("a.png", ".hidden.png", ".ipynb_checkpoints/a.png", "__MACOSX/b.png"):
        Path(tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    assert [record.id for record in open_dataset(str(tmp_path))] == ["a.png"]
