"""Damaged and ambiguous tables are refused, or their bad rows are named and the others read."""

import io
import json
import tarfile
from datetime import datetime
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from flowalign.data import open_dataset
from tests.fixtures.tables import jsonl

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


def put(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")


def stored(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        rows = [{"prompt": name, "image": b"x"}]
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / name)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            ["data/train-00000-of-00002.parquet", "data/test_unique-00000-of-00001-a1b2.parquet"],
            r"has the splits test, train; name one, such as '.*/data/test\*'",
        ),
        (["training/a.png", "Validation/b.png"], r"training, validation; .* '.*/Validation'"),
    ],
)
def test_a_folder_with_several_splits_is_refused(tmp_path, names, said):
    (stored if names[0].endswith("parquet") else put)(tmp_path, *names)
    with pytest.raises(ValueError, match=said) as error:
        open_dataset(str(tmp_path))
    named = str(error.value).split("'")[1]
    assert len(list(open_dataset(named))) == 1


@pytest.mark.parametrize(
    "names", [["train/a.png", "trees/b.png"], ["train.png", "test.png"], ["evaluator/a.png"]]
)
def test_names_of_images_and_of_one_split_are_no_splits(tmp_path, names):
    put(tmp_path, *names)
    assert sorted(record.id for record in open_dataset(str(tmp_path))) == sorted(names)
    stored(tmp_path / "p", "train-00000-of-00002.parquet", "train-00001-of-00002.parquet")
    assert len(list(open_dataset(str(tmp_path / "p")))) == 2


def test_files_that_a_folder_leaves_out_are_counted(tmp_path, capsys):
    put(tmp_path, "a.png", "b.heic", "c.heic", "d/metadata.jsonl", "notes", ".hidden.heic")
    captions = {"a.txt": "a cat", "e.caption": "a dog", "f.TXT": "a cow"}
    put(tmp_path, "e.png", "f.webm")
    for name, caption in captions.items():
        (tmp_path / name).write_text(caption)
    prompts = [record.prompt for record in open_dataset(str(tmp_path))]
    assert prompts == ["a cat", "a dog", "a cow"]
    said = "4 files of other kinds are left out: 2 .heic, 1 metadata.jsonl, 1 ?"
    assert said in capsys.readouterr().err


def test_images_that_a_listing_does_not_name_are_counted_and_two_listings_refused(tmp_path, capsys):
    put(tmp_path, "a.png", "b/c.png", "d.png", "e.png")
    rows = [{"file_name": "./b/../a.png"}, {"images": ["b/c.png", "d.png"]}]
    jsonl(tmp_path, *rows, name="metadata.jsonl")
    open_dataset(str(tmp_path))
    said = "1 images or videos are left out, because no row of metadata.jsonl names them: e.png"
    assert said in capsys.readouterr().err
    (tmp_path / "metadata.csv").write_text("file_name\na.png\n")
    with pytest.raises(ValueError, match=r"holds metadata.jsonl and metadata.csv; name one"):
        open_dataset(str(tmp_path))


@pytest.mark.parametrize("braces", ["{0..1000000000}", "{0..999}{000..999}", "{9..1}", "{0..%s}"])
def test_braces_of_too_many_or_no_files_are_refused(tmp_path, braces):
    with pytest.raises(ValueError, match=r"names (0|over 100000) files; from 1 to 100000 are read"):
        open_dataset(f"{tmp_path}/{braces.replace('%s', '9' * 99)}.tar")


def test_a_large_member_of_a_compressed_shard_is_a_bad_row(tmp_path, monkeypatch):
    monkeypatch.setattr("flowalign.data.readers.formats._LARGEST_SAMPLE", 1 << 20)
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        for name, size in (("a.png", 9), ("b.0.png", 1 << 19), ("b.1.png", 1 << 20), ("c.png", 9)):
            member = tarfile.TarInfo(name)
            member.size = size
            archive.addfile(member, io.BytesIO(bytes(size)))
    first, bad, last = open_dataset(str(tmp_path / "a.tar.gz"), "generic")
    assert (first.problem, last.problem) == ("", "")
    assert bad.problem == "invalid row: a.tar.gz row 2: (b) has more than 1 MiB"


def test_a_long_value_that_a_parquet_file_repeats_is_read_a_few_rows_at_a_time(
    tmp_path, monkeypatch
):
    table = pyarrow.table({"prompt": ["x" * 2**20 + "y"] * 9, "image": [f"{k}" for k in range(9)]})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 2**17
    monkeypatch.setattr("flowalign.data.readers.formats._MEMORY", 2**21 + 2**10)
    sizes, real = [], parquet.ParquetFile.iter_batches
    monkeypatch.setattr(
        parquet.ParquetFile, "iter_batches", lambda file, n: sizes.append(n) or real(file, n)
    )
    problems = [record.problem for record in open_dataset(str(tmp_path / "a.parquet"), "generic")]
    assert set(sizes) == {2}
    assert len(problems) == 9
    assert problems[0].endswith("prompt has 1048577 characters; 1048576 are allowed")


def test_a_damaged_page_of_a_parquet_file_is_named(tmp_path):
    stored(tmp_path, "a.parquet")
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[4:24] = bytes(20)
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.parquet is damaged or not a parquet file"):
        list(open_dataset(str(tmp_path / "a.parquet")))


FORMS = {
    "scalars first": ("q.json", '{"n": 1, "by": "a \\"b\\"", "rows": [{"image": "a.png"}]}'),
    "whole float": ("q.jsonl", '{"id": 1.0, "image": "a.png"}'),
    "file url": ("q.jsonl", '{"image": "file:///a%20b.png"}'),
}


@pytest.mark.parametrize("form", FORMS)
def test_harmless_forms_of_tables_are_read(tmp_path, form):
    name, content = FORMS[form]
    (tmp_path / name).write_text(content)
    (record,) = open_dataset(str(tmp_path / name))
    assert record.problem == ""
    assert record.id == ("1" if form == "whole float" else "#1")
    path = "/a b.png" if form == "file url" else str(tmp_path / "a.png")
    assert record.media[0].path == path


def test_json_lines_named_json_are_refused_with_the_remedy(tmp_path):
    (tmp_path / "q.json").write_text('{"image": "a.png"}\n{"image": "b.png"}\n')
    with pytest.raises(ValueError, match=r"rename it to \.jsonl if it has one object per line"):
        open_dataset(str(tmp_path / "q.json"))


def test_a_parquet_file_that_unpacks_to_far_more_than_it_stores_is_refused(tmp_path, monkeypatch):
    table = pyarrow.table({"prompt": ["x" * 2**20] * 9, "image": ["a.png"] * 9})
    parquet.write_table(table, tmp_path / "a.parquet", compression="zstd")
    monkeypatch.setattr("flowalign.data.readers.formats._LARGEST_COLUMN", 2**19)
    with pytest.raises(ValueError, match=r"a\.parquet .* its column prompt unpacks from \d+ to"):
        open_dataset(str(tmp_path / "a.parquet"))


def test_files_of_a_sample_that_lie_apart_in_a_shard_are_refused(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in ("0.png", "1.png", "0.txt", "1.txt"):
            member = tarfile.TarInfo(name)
            member.size = 1
            archive.addfile(member, io.BytesIO(b"x"))
    with pytest.raises(ValueError, match=r"the files of sample '0' apart, or twice; sort them"):
        list(open_dataset(str(tmp_path / "a.tar")))
