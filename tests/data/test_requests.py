"""Prompts come from files, and once from pipes and standard input."""

import csv
import io
import json
import os
import sys
import threading
from datetime import datetime
from pathlib import Path

import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from flowalign.data import requests
from flowalign.data.media_record import read_reference
from flowalign.data.readers import open_dataset
from flowalign.data.requests import read_located_requests_once, read_requests
from flowalign.runs.sampling_job import Medium, _format_rows
from flowalign.types import Request, prompts_of
from flowalign.utils.media.decode import decode
from flowalign.utils.media.media import Media
from tests.fixtures.tables import jsonl

TEXT, ROWS = "a cat\n\n  two dogs \n", '{"prompt": "a cat", "seed": 1}\n{"prompt": "two dogs"}\n'


def typed(monkeypatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="ascii"))


def read_once(source: str) -> list[str]:
    return prompts_of([request for _, request in read_located_requests_once(source)])


@pytest.mark.parametrize("text", [TEXT, ROWS], ids=["text", "jsonl"])
def test_standard_input_is_read_as_a_file_of_its_kind_would_be(monkeypatch, text):
    typed(monkeypatch, text.encode())
    assert read_once("-") == ["a cat", "two dogs"]


def test_standard_input_is_utf_8_wherever_it_comes_from(monkeypatch):
    typed(monkeypatch, "ein Bär\n".encode())
    assert read_once("-") == ["ein Bär"]
    typed(monkeypatch, b"\xe4\n")
    with pytest.raises(ValueError, match="'-' is not text in UTF-8"):
        read_once("-")


def test_braces_that_are_no_row_are_a_prompt_and_a_bad_row_after_good_ones_is_named(monkeypatch):
    typed(monkeypatch, b"{red|blue} cat\nb\n")
    assert read_once("-") == ["{red|blue} cat", "b"]
    typed(monkeypatch, ROWS.encode() + b"third\n")
    with pytest.raises(ValueError, match=r"-:3: not JSON"):
        read_once("-")


@pytest.mark.parametrize("where", ["/dev/fd/{}", "fifo"])
def test_a_pipe_is_read_once(tmp_path, where):
    """A process substitution of the shell is such a path."""
    if where == "fifo":
        path = str(tmp_path / "prompts")
        os.mkfifo(path)
        writer = threading.Thread(target=Path(path).write_text, args=(TEXT,))
        writer.start()
        assert read_once(path) == ["a cat", "two dogs"]
        writer.join()
        return
    read, write = os.pipe()
    os.write(write, TEXT.encode())
    os.close(write)
    assert read_once(where.format(read)) == ["a cat", "two dogs"]
    os.close(read)


def test_an_empty_stream_holds_no_prompt(monkeypatch):
    typed(monkeypatch, b"\n \n")
    with pytest.raises(ValueError, match="'-' holds no prompt"):
        read_once("-")


def test_files_are_read_alike_and_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path):
    (tmp_path / "p.txt").write_text(f"\ufeff{TEXT}", encoding="utf-8")
    (tmp_path / "p.jsonl").write_text(ROWS)
    for name in ("p.txt", "p.jsonl"):
        path = str(tmp_path / name)
        assert read_once(path) == prompts_of(read_requests(path)) == ["a cat", "two dogs"]
    with pytest.raises(ValueError, match="does not exist"):
        read_once(str(tmp_path))


@pytest.mark.parametrize("mark", "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029")
def test_only_line_feeds_end_lines(tmp_path, monkeypatch, mark):
    (tmp_path / "p.txt").write_text(f"a red{mark}circle\r\ntwo\n", encoding="utf-8", newline="")
    assert read_once(str(tmp_path / "p.txt")) == [f"a red{mark}circle", "two"]
    if mark > "\x20":  # JSON escapes the others
        row = json.dumps({"prompt": f"a red{mark}circle"}, ensure_ascii=False)
        (tmp_path / "p.jsonl").write_text(f"{row}\n", encoding="utf-8")
        assert read_once(str(tmp_path / "p.jsonl")) == [f"a red{mark}circle"]
        typed(monkeypatch, row.encode())
        assert read_once("-") == [f"a red{mark}circle"]


def table(path: Path, rows: list[dict]) -> None:
    """Write rows in the format of the file name."""
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".json":
        path.write_text("\ufeff" + json.dumps(rows), encoding="utf-8")
    else:
        jsonl(path.parent, *rows, name=path.name)


@pytest.mark.parametrize("name", ["p.csv", "p.tsv", "p.json", "p.parquet", "p.ndjson", "P.JSONL"])
def test_tables_hold_prompts_and_their_other_columns_are_metadata(tmp_path, name):
    Image.new("RGB", (3, 2)).save(tmp_path / "a.png")
    rows = [{"prompt": "a, b\nc", "image": "a.png", "n": "1"}, {"prompt": "d", "n": "2"}]
    table(tmp_path / name, rows)
    first, second = read_requests(str(tmp_path / name))
    assert prompts_of([first, second]) == ["a, b\nc", "d"]
    assert [request.metadata for request in (first, second)] == [{"n": "1"}, {"n": "2"}]
    assert [len(request.references) for request in (first, second)] == [1, 0]
    (tmp_path / name).unlink()
    table(tmp_path / name, [{"caption": "a"}])
    with pytest.raises(ValueError, match=f"{name}( row |:)1: expected .* 'prompt', got .*caption"):
        read_requests(str(tmp_path / name))


@pytest.mark.parametrize("name", ["p.csv", "p.jsonl", "p.parquet"])
def test_a_path_may_name_the_columns(tmp_path, name):
    Image.new("RGB", (3, 2)).save(tmp_path / "a.png")
    table(tmp_path / name, [{"caption": "a red fox", "source": "a.png", "n": "1"}])
    plain = tmp_path / name
    (request,) = read_requests(f"{plain}:caption")
    assert (request.prompt, request.metadata) == ("a red fox", {"source": "a.png", "n": "1"})
    (request,) = read_requests(f"{plain}:prompt=caption,image=source")
    assert (len(request.references), request.metadata) == (1, {"n": "1"})
    with pytest.raises(ValueError, match=f"name the column of the prompts, such as .*{name}:cap"):
        read_requests(plain)
    with pytest.raises(ValueError, match=r"has no column 'text'; there are caption, n, source"):
        read_requests(f"{plain}:text")


def test_a_row_of_a_table_that_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "p.csv"
    for content, why in (
        (b"prompt,n\na\n", "p.csv row 1 has more or fewer cells than the header"),
        (b"prompt,image\na,b.png\n", r"p.csv row 1: missing file: .*b\.png"),
        (b"prompt\n", "p.csv' holds no prompt"),
        (b"prompt\ncaf\xe9\n", "p.csv' is not text in UTF-8"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=why):
            read_requests(str(path))
    made = {"prompt": "a", "made": datetime(2026, 1, 1)}
    table(tmp_path / "p.parquet", [made | {"image": 3}])
    with pytest.raises(ValueError, match=r"p\.parquet row 1: image must be a path, bytes or a PIL"):
        read_requests(str(tmp_path / "p.parquet"))
    table(tmp_path / "p.parquet", [made | {"image": None}])
    assert read_requests(str(tmp_path / "p.parquet")) == [Request("a")]


def test_a_file_of_another_kind_is_refused_with_the_kinds_that_are_read(tmp_path):
    for name in ("p.yaml", "p.xlsx", "p.md"):
        (tmp_path / name).write_text("- a cat\n")
        with pytest.raises(
            ValueError, match=r"\.jsonl, \.ndjson, \.json, \.csv, .*: got \."
        ) as found:
            read_requests(str(tmp_path / name))
        assert len(str(found.value).splitlines()) <= 5
    for name in ("p.txt", "p"):
        (tmp_path / name).write_text("\n" + ROWS)
        with pytest.raises(
            ValueError, match=rf"{name}:2 is a JSON object: rename the file to \.jsonl"
        ):
            read_requests(str(tmp_path / name))


def test_what_reads_prompts_again_and_again_takes_no_pipe(tmp_path):
    os.mkfifo(tmp_path / "prompts")
    with pytest.raises(ValueError, match="is a pipe, which can be read once only"):
        read_requests(str(tmp_path / "prompts"))


def test_rows_name_pictures_and_a_mask_beside_the_file_and_the_rest_is_metadata(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for k, name in enumerate(("a.png", "b.png", "m.png")):
        Image.new("RGB", (3, 2), (40 * k, 1, 2)).save(folder / name)
    rows = [
        {"prompt": "x", "image": "a.png", "n": 1},
        {"prompt": "x", "images": ["b.png", "a.png"], "mask": "m.png"},
        {"prompt": "x", "references": "a.png", "n": 1},
    ]
    (folder / "edits.jsonl").write_text("\n".join(map(json.dumps, rows)))
    one, two, same = read_requests(str(folder / "edits.jsonl"))
    assert one == same != two
    assert [Path(each.name).name for each in two.references] == ["b.png", "a.png"]
    assert two.mask is not None
    assert two.mask.read()[0, :, 0, 0].mul(255).tolist() == [80, 1, 2]
    assert (dict(one.metadata), dict(two.metadata)) == ({"n": 1}, {})
    assert (
        len({one.input_digest, two.input_digest, same.input_digest, Request("x").input_digest}) == 3
    )


def test_a_transparent_mask_stays_a_mask(tmp_path):
    """Transparency is unchanged, that is, black: the mask was painted on an empty layer."""
    hole = Image.new("RGBA", (2, 1), (255, 255, 255, 0))
    hole.putpixel((0, 0), (255, 255, 255, 255))
    hole.save(tmp_path / "m.png")
    row = {"prompt": "x", "image": "m.png", "mask": "m.png"}
    (tmp_path / "fills.jsonl").write_text(json.dumps(row))
    (request,) = read_requests(str(tmp_path / "fills.jsonl"))
    assert request.mask is not None
    assert request.references[0].read()[0, 0, 0].tolist() == [1, 1]
    assert request.mask.read()[0, 0, 0].tolist() == [1, 0]
    (tmp_path / "a.jsonl").write_text('{"image": "m.png", "request_mask": "m.png"}')
    (record,) = open_dataset(str(tmp_path / "a.jsonl"))
    assert record.mask is not None
    assert decode(record.mask).frames[0, 0, 0].tolist() == [1, 0]


def test_pictures_are_known_by_content_and_turned_as_their_exif_data_say(tmp_path):
    upright = Image.new("RGB", (5, 3), "red")
    exif = Image.Exif()
    exif[0x0112] = 6
    upright.save(tmp_path / "a.png", exif=exif)
    first = read_reference(Media(str(tmp_path / "a.png")))
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes())
    assert read_reference(Media(str(tmp_path / "b.png"))) == first
    assert first.read().shape == (1, 3, 5, 3)
    Image.new("RGB", (5, 3), "blue").save(tmp_path / "a.png")
    os.utime(tmp_path / "a.png", ns=(1, 1))
    assert read_reference(Media(str(tmp_path / "a.png"))) != first


def test_a_listing_of_samples_keeps_the_mask_of_each_request(tmp_path):
    for k, name in enumerate(("a.png", "m.png")):
        Image.new("RGB", (3, 2), (40 * k, 1, 2)).save(tmp_path / name)
    row = {"prompt": "x", "image": "a.png", "mask": "m.png"}
    (tmp_path / "fills.jsonl").write_text(json.dumps(row))
    (request,) = read_requests(str(tmp_path / "fills.jsonl"))
    (listed,) = _format_rows([Medium(request, 0, 0)], seed=3)
    (tmp_path / "metadata.jsonl").write_text(listed)
    (record,) = open_dataset(str(tmp_path / "metadata.jsonl"))
    assert record.request() == request
    assert "mask" not in record.metadata
    again = read_requests(str(tmp_path / "metadata.jsonl"))[0]
    assert (again.mask, again.references) == (request.mask, request.references)


def test_a_text_file_is_parsed_again_only_after_it_changed(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("a red ball\n")
    first, again = read_requests(str(file)), read_requests(str(file))
    assert first[0] is again[0]
    assert first is not again, "a caller may change its list"
    file.write_text("a blue ball\ntwo cats\n")
    assert prompts_of(read_requests(str(file))) == ["a blue ball", "two cats"]


def test_json_lines_are_parsed_once_and_their_pictures_looked_at_each_time(tmp_path, monkeypatch):
    file, picture = tmp_path / "prompts.jsonl", tmp_path / "cat.png"
    file.write_text('{"prompt": "paint it", "image": "cat.png"}\n{"prompt": "a dog", "seed": 1}\n')
    parsed = []
    monkeypatch.setattr(
        requests, "_parse_json", lambda line, _: parsed.append(line) or json.loads(line)
    )
    digests = set()
    for colour in ("red", "blue"):
        Image.new("RGB", (4, 4), colour).save(picture)
        os.utime(picture, ns=(len(digests), len(digests)))
        painted, plain = read_requests(str(file))
        digests.add(painted.references[0].digest)
        assert (plain.prompt, plain.metadata) == ("a dog", {"seed": 1})
    assert (len(parsed), len(digests)) == (2, 2)
    file.write_text('{"prompt": "a horse"}\n')
    assert prompts_of(read_requests(str(file))) == ["a horse"]
