"""Files and folders are read as records; errors stay within their row."""

import json
import os
import sys
from pathlib import Path

import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from flowalign.data import readers
from flowalign.data.readers import formats as row_files
from flowalign.data.readers import open_dataset
from flowalign.utils.media.decode import decode
from flowalign.utils.media.media import Media
from tests.fixtures.tables import jsonl, only, table


def test_generic_rows_keep_what_people_said_and_other_columns(tmp_path):
    row = {
        "id": 7,
        "caption": "a cat",
        "images": ["a.png", "b/c.png", "/d.png"],
        "seed": 3,
        "ranks": [2, 1, 3],
        "ratings": {"beauty": [1.5, 2, 3], "safety": None},
        "votes": {"overall": [0.25, 0.75, 0]},
        "references": ["r.png"],
    }
    record = only(jsonl(tmp_path, row), "generic")
    assert (record.id, record.prompt) == ("7", "a cat")
    paths = [str(tmp_path / "a.png"), str(tmp_path / "b/c.png"), "/d.png"]
    assert [medium.path for medium in record.media] == paths
    assert record.references == [Media(str(tmp_path / "r.png"))]
    assert record.ranks == {"overall": [2, 1, 3]}
    assert record.ratings == {"beauty": [1.5, 2, 3]}
    assert record.votes == {"overall": [0.25, 0.75, 0]}
    assert record.metadata == {"seed": 3}


def test_a_mask_of_a_source_is_the_request_s_under_its_name(tmp_path):
    row = {"prompt": "x", "image": "a.png", "references": ["r.png"], "request_mask": "m.png"}
    record = only(jsonl(tmp_path, row), "generic")
    assert (record.mask, record.metadata) == (Media(str(tmp_path / "m.png")), {})


def test_a_struct_of_bytes_and_path_is_a_medium(tmp_path):
    rows = [
        {"prompt": "x", "image": {"bytes": b"png", "path": "name.png"}},
        {"prompt": "y", "image": {"bytes": None, "path": "name.png"}},
    ]
    first, second = open_dataset(table(tmp_path, *rows))
    assert first.media == [Media(data=b"png")]
    assert second.media == [Media(path=str(tmp_path / "name.png"))]


def test_a_folder_takes_prompts_from_the_texts_beside_the_media(tmp_path):
    for name in ("b.png", "a/c.JPG", "note.txt", "d.mp4"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "b.txt").write_text("a boat\n")
    records = list(open_dataset(str(tmp_path)))
    prompts = {record.id: record.prompt for record in records}
    assert prompts == {"a/c.JPG": "", "b.png": "a boat", "d.mp4": ""}
    assert records[0].media == [Media(str(tmp_path / "a/c.JPG"))]


def test_images_of_a_folder_are_known_by_all_endings_of_their_formats(tmp_path):
    for name in ("a.avif", "b.jfif", "c.jpe", "d.JPG"):
        kind = "AVIF" if name == "a.avif" else "JPEG"
        Image.new("RGB", (5, 9), "red").save(tmp_path / name, kind)
    records = list(open_dataset(str(tmp_path)))
    assert [decode(record.media[0]).pixels.shape for record in records] == [(1, 3, 9, 5)] * 4


def test_a_folder_with_a_listing_is_read_by_it(tmp_path):
    (tmp_path / "b.png").write_bytes(b"")
    jsonl(tmp_path, {"file_name": "b.png", "text": "a boat"}, name="metadata.jsonl")
    (record,) = open_dataset(str(tmp_path))
    assert (record.prompt, record.media) == ("a boat", [Media(str(tmp_path / "b.png"))])


def test_a_folder_of_parquet_files_is_one_dataset(tmp_path):
    for k in (1, 0):
        table(tmp_path, {"prompt": f"p{k}", "image": b"x"}, name=f"train-{k}.parquet")
    dataset = open_dataset(str(tmp_path))
    assert [record.prompt for record in dataset] == ["p0", "p1"]
    assert dataset.size() == 2


def test_columns_of_two_schemas_are_ambiguous_until_one_is_chosen(tmp_path):
    row = {
        "prompt": "p",
        "path1": "a",
        "path2": "b",
        "left_image": "a",
        "right_image": "b",
        "vote_type": "tievote",
    }
    path = jsonl(tmp_path, row)
    with pytest.raises(ValueError, match="fits several schemas: hpd_v3, genai_bench; choose one"):
        open_dataset(path)
    (record,) = open_dataset(path, "genai_bench")
    assert record.ranks == {"overall": [1, 1]}


def test_wrong_schemas_are_refused_with_what_there_is(tmp_path):
    path = jsonl(tmp_path, {"prompt": "p", "picture": "a.png"})
    with pytest.raises(ValueError, match=r"no schema fits the columns picture, prompt") as found:
        open_dataset(path)
    assert str(found.value).splitlines()[1] == (
        "generic lacks images|videos|image|video|path|file_name: map a column, such as "
        "--columns image=picture"
    )
    with pytest.raises(ValueError, match=r"needs the columns jpg_0, jpg_1"):
        open_dataset(path, "pick_a_pic")
    with pytest.raises(ValueError, match="schema is 'picapic'; did you mean 'pick_a_pic"):
        open_dataset(path, "picapic")
    with pytest.raises(ValueError, match="does not exist"):
        open_dataset(str(tmp_path / "none.jsonl"))


def test_a_bad_row_is_a_record_that_says_where_and_the_next_ones_are_read(tmp_path):
    path = Path(jsonl(tmp_path, {"prompt": "p", "image": "a.png"}))
    bad = [
        "{broken",
        "[1]",
        '{"prompt": "p"}',
        '{"prompt": 3, "image": "a.png"}',
        '{"image": "http://x/a.png"}',
        '{"images": ["a", "b"], "ranks": [1]}',
        '{"image": "a.png", "ratings": [NaN]}',
        "",
    ]
    good = '{"prompt": "last", "image": "a.png"}'
    path.write_text(path.read_text() + "\n".join([*bad, good]) + "\n")
    first, *middle, last = open_dataset(str(path))
    assert (first.problem, last.problem, last.prompt) == ("", "", "last")
    assert [record.problem.removeprefix("invalid row: data.jsonl ") for record in middle] == [
        "row 2: is not JSON (Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1))",
        "row 3: is not a JSON object",
        "row 4: images is not a list of media",
        "row 5: prompt is 3, not text",
        "row 6: image is a URL; download it first",
        "row 7: ranks of overall must hold 2 numbers, one per item",
        "row 8: ratings of overall is nan, not a finite number",
    ]
    assert all(not record.media for record in middle)


def test_the_later_of_two_rows_with_one_id_is_invalid(tmp_path):
    rows = [{"id": i, "image": f"{k}.png"} for k, i in enumerate(["a", "b", "a", "c"])]
    problems = [record.problem for record in open_dataset(jsonl(tmp_path, *rows))]
    assert problems == ["", "", "duplicate id: data.jsonl row 3 has id 'a' of an earlier row", ""]


def test_a_long_json_list_is_read_item_by_item(tmp_path, monkeypatch):
    monkeypatch.setattr(row_files, "_CHARACTERS_AT_ONCE", 5)
    rows = [{"prompt": f"zebra {k} ]}},", "image": f"{k}.png", "seed": 10**k} for k in range(9)]
    path = tmp_path / "data.json"
    path.write_text(json.dumps(rows, indent=1))
    records = list(open_dataset(str(path)))
    assert [record.prompt for record in records] == [row["prompt"] for row in rows]
    assert [record.metadata["seed"] for record in records] == [10**k for k in range(9)]
    path.write_text(json.dumps(rows)[:-30])
    found = row_files.read_json(path)
    assert next(found).fields == rows[0]
    with pytest.raises(ValueError, match="is truncated"):
        list(found)


def test_parquet_rows_are_read_some_at_a_time(tmp_path, monkeypatch):
    path = table(tmp_path, *({"prompt": f"{k}", "image": b"x"} for k in range(9)))
    asked = []

    class Watched(parquet.ParquetFile):
        def iter_batches(self, *args, **kwargs):
            for batch in super().iter_batches(*args, **kwargs):
                asked.append(len(batch))
                yield batch

    monkeypatch.setattr(parquet, "ParquetFile", Watched)
    monkeypatch.setattr(row_files, "ROWS_AT_ONCE", 2)
    stream = row_files.read_parquet(Path(path))
    assert [next(stream).number for _ in range(3)] == [1, 2, 3]
    assert sum(asked) == 4
    assert len(list(stream)) == 6


def test_the_memory_for_parquet_does_not_grow_with_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(row_files, "ROWS_AT_ONCE", 2)
    rows = [{"prompt": f"{k}", "image": os.urandom(1 << 18)} for k in range(64)]
    path = table(tmp_path, *rows)
    before = pyarrow.total_allocated_bytes()
    held = [pyarrow.total_allocated_bytes() - before for _ in row_files.read_parquet(Path(path))]
    assert len(held) == 64
    assert max(held) < 4 << 20, "of 16 MiB"


def test_cells_too_many_or_too_few_are_a_bad_row(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("prompt,image\nx,a.png\ny\nz,b.png,1\nw,c.png\n")
    problems = [bool(record.problem) for record in open_dataset(str(path))]
    assert problems == [False, True, True, False]


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    path = table(tmp_path, {"prompt": "p", "image": b"x"})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"pip install 'flowalign-diffusion\[data\]'"):
        open_dataset(path)


def test_the_identity_is_of_the_contents(tmp_path):
    rows = [{"prompt": "p", "image": "a.png"}]
    before = open_dataset(jsonl(tmp_path, *rows)).identity()
    assert open_dataset(jsonl(tmp_path, *rows)).identity() == before
    assert open_dataset(jsonl(tmp_path, {"prompt": "q", "image": "a.png"})).identity() != before


def test_the_stamp_of_a_record_follows_its_files_and_its_row(tmp_path, monkeypatch):
    def stamp(**row) -> str:
        return only(jsonl(tmp_path, {"prompt": "p", "image": "a.png"} | row), "generic").stamp()

    (tmp_path / "a.png").write_bytes(b"12")
    (tmp_path / "frames").mkdir()
    (tmp_path / "frames" / "1.png").write_bytes(b"1")
    first, missing, frames = stamp(), stamp(image="b.png"), stamp(image="frames")
    monkeypatch.chdir(tmp_path)
    assert only("data.jsonl", "generic").stamp() == frames, "the working directory does not matter"
    (tmp_path / "frames" / ".DS_Store").write_bytes(b"1")
    assert (stamp(), stamp(image="frames")) == (first, frames)
    os.utime(tmp_path / "a.png", ns=(1, 1))
    (tmp_path / "b.png").write_bytes(b"1")
    (tmp_path / "frames" / "2.png").write_bytes(b"1")
    changed = [stamp(), stamp(image="b.png"), stamp(image="frames"), stamp(seed=1)]
    changed += [stamp(prompt="q"), stamp(references=["b.png"]), stamp(fps=8), stamp(id="x")]
    assert len({first, missing, frames, *changed}) == 11
    contents = [
        only(table(tmp_path, {"prompt": "p", "image": data}), "generic") for data in (b"x", b"y")
    ]
    assert len({record.stamp() for record in contents}) == 2


def test_every_schema_has_a_name_of_its_own():
    assert len(readers.SCHEMAS) == 18
