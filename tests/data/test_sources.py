"""Datasets of the library `datasets` and lists in Python are read like files."""

import io
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from flowalign.data import PreferenceDataset, open_dataset, read_requests
from flowalign.data.readers import parse_columns
from flowalign.types import Request, prompts_of
from flowalign.utils.media.decode import decode
from tests.fixtures.tables import jsonl


def datasets() -> Any:
    """Return the library, which takes 80 MB that other tests do not need."""
    return import_module("datasets")


def picture(k: int, mode: str = "RGB") -> Image.Image:
    return Image.effect_noise((6, 4), 9 + 40 * k).convert(mode)


def file_of(image: Image.Image) -> bytes:
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


PAIRS = [{"prompt": f"p{k}", "chosen": picture(k), "rejected": picture(k + 3)} for k in range(3)]
LABELS = [{"prompt": f"p{k}", "image": picture(k), "label": k > 0} for k in range(3)]
PICKED = [
    {
        "caption": f"p{k}",
        "jpg_0": file_of(picture(k)),
        "jpg_1": file_of(picture(k + 3)),
        "label_0": [1.0, 0.0, 0.5][k],
        "label_1": [0.0, 1.0, 0.5][k],
    }
    for k in range(3)
]
ROWS = {"pairs": PAIRS, "labels": LABELS, "picked": PICKED}


def to_file(folder: Path, rows: list[dict]) -> str:
    """Write rows as JSONL with image files."""
    listed = []
    for n, row in enumerate(rows):
        listed.append({})
        for name, value in row.items():
            content = file_of(value) if isinstance(value, Image.Image) else value
            if isinstance(content, bytes):
                (folder / f"{n}-{name}.png").write_bytes(content)
                content = f"{n}-{name}.png"
            listed[-1][name] = content
    return jsonl(folder, *listed)


def table_of(rows: list[dict]) -> Any:
    return datasets().Dataset.from_list(rows)


FORMS = {
    "list": lambda rows: rows,
    "dataset": table_of,
    "torch": lambda rows: table_of(rows).with_format("torch"),
    "stream": lambda rows: table_of(rows).to_iterable_dataset(),
    "generator": lambda rows: datasets().IterableDataset.from_generator(lambda: iter(rows)),
    "transform": lambda rows: table_of(rows).with_transform(lambda batch: batch),
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_rows_in_python_give_the_records_of_a_file(tmp_path, form, rows):
    if form is FORMS["transform"]:
        rows = [
            row for row in rows if not any(isinstance(v, bytes) for v in row.values())
        ] or LABELS
    records, filed = [*open_dataset(form(rows))], [*open_dataset(to_file(tmp_path, rows))]
    for record, other in zip(records, filed, strict=True):
        assert not record.problem
        assert replace(record, media=()) == replace(other, media=())
        for medium, stored in zip(record.media, other.media, strict=True):
            assert decode(medium).pixels.equal(decode(stored).pixels)
    assert [one.stamp() for one in open_dataset(form(rows))] == [one.stamp() for one in records]


def test_examples_for_training_come_from_python_too():
    pairs, report = PreferenceDataset(path=table_of(PAIRS)).read()
    assert [(pair.prompt, report.total) for pair in pairs] == [("p0", 0), ("p1", 0), ("p2", 0)]
    samples, _ = PreferenceDataset(path=LABELS, kind="samples").read(labelled=True)
    assert [sample.desirable for sample in samples] == [False, True, True]
    picked, report = PreferenceDataset(path=table_of(PICKED)).read()
    assert [pair.prompt for pair in picked] == ["p0", "p1"]
    assert report.lines() == ["1 tie: dataset row 3: overall"]


RENAMED = {
    "pairs": (PAIRS, {"winner": "chosen", "loser": "rejected"}, {}),
    "a list of two columns": (
        PAIRS,
        {"left": "chosen", "right": "rejected"},
        {"images": ["left", "right"]},
    ),
    "Pick-a-Pic with another caption": (
        [{k: v for k, v in row.items() if k[:5] != "label"} for row in PICKED],
        {"text_en": "caption", "a": "jpg_0", "b": "jpg_1"},
        {"prompt": "text_en", "chosen": "a", "rejected": "b"},
    ),
}


@pytest.mark.parametrize("case", RENAMED.values(), ids=RENAMED)
@pytest.mark.parametrize("form", ["file", "dataset"])
def test_a_column_map_gives_columns_their_names_in_flowalign(tmp_path, case, form):
    rows, theirs, columns = case
    named = {ours: name for name, ours in theirs.items()}
    rows = [{named.get(name, name): value for name, value in row.items()} for row in rows]
    source = table_of(rows) if form == "dataset" else to_file(tmp_path, rows)
    columns = columns or {ours: name for name, ours in theirs.items()}
    records = list(open_dataset(source, columns=columns))
    assert [(one.prompt, len(one.media), one.problem) for one in records] == [
        (f"p{k}", 2, "") for k in range(3)
    ]
    swapped = columns | {"user_id": next(iter(theirs))}
    identities = [open_dataset(source, columns=one).identity() for one in (columns, swapped)]
    assert identities[0] != identities[1]


def test_a_column_map_of_the_command_line_is_parsed():
    assert parse_columns(["prompt=caption", "images=a,b"]) == {
        "prompt": "caption",
        "images": ["a", "b"],
    }
    assert parse_columns([]) is None
    for wrong in ("prompt", "=caption", "prompt="):
        with pytest.raises(ValueError, match=f"--columns '{wrong}' is not NAME=COLUMN"):
            parse_columns([wrong])


@pytest.mark.parametrize(
    ("source", "columns", "said"),
    [
        (PAIRS, {"prompt": "captoin"}, r"has no column 'captoin'; there are chosen, prompt, rej"),
        (PAIRS, {"promt": "prompt"}, "reads no column 'promt'; did you mean 'prompt'"),
        ([], None, "dataset holds no row"),
        ([3], None, "row 1 is a int, not a dictionary"),
        (iter(PAIRS), None, r"list_iterator. An iterator can be read once only: give list\("),
        ({"prompt": ["a"]}, None, r"dictionary of columns \['prompt'\]. Give Dataset.from_dict"),
        (
            lambda: datasets().DatasetDict(train=table_of(PAIRS)),
            None,
            r"splits \['train'\]. Give one of",
        ),
        ("hub:x", None, "'hub:x' is no dataset of the Hub; write hub:OWNER/NAME:SPLIT"),
    ],
)
def test_wrong_sources_are_refused_with_what_there_is(source, columns, said):
    with pytest.raises(ValueError, match=said):
        open_dataset(source() if callable(source) else source, columns=columns)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "image is missing"),
        ({"bytes": None, "path": "hf://datasets/x/a.png"}, "image is a URL; download it first"),
        (3.5, "image must be a path, bytes or a PIL image, got 3.5"),
        (Image.new("F", (2, 2)), "image has pixel values of unknown range"),
    ],
)
def test_a_row_in_python_that_cannot_be_used_says_where(value, said):
    _, record = open_dataset([LABELS[0], {"prompt": "x", "image": value, "label": 1}])
    assert record.problem.startswith(f"invalid row: dataset row 2: {said}")


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16"])
def test_a_pil_image_is_read_as_viewers_show_it(tmp_path, mode):
    image = picture(1).convert(mode) if mode != "I;16" else Image.new(mode, (6, 4), 40000)
    exif = Image.Exif()
    exif[0x0112] = 6
    ending = "jpg" if mode in ("CMYK", "YCbCr") else "png"
    image.save(tmp_path / f"a.{ending}", exif=exif)
    stored = Image.open(tmp_path / f"a.{ending}")
    in_memory, filed = open_dataset([{"image": stored}, {"image": tmp_path / f"a.{ending}"}])
    pixels = decode(filed.media[0]).pixels
    assert pixels.shape == (1, 3, 6, 4)
    assert decode(in_memory.media[0]).pixels.equal(pixels)


def test_prompts_come_from_lists_and_datasets(tmp_path):
    rows = [{"prompt": f"p{k}", "n": k} for k in range(3)]
    asked = read_requests(to_file(tmp_path, rows))
    for source in (rows, table_of(rows), table_of(rows).to_iterable_dataset()):
        assert read_requests(source) == asked
    assert prompts_of(read_requests(["a", " b "])) == ["a", " b "]
    assert read_requests([Request("a", metadata={"n": 1})])[0].metadata == {"n": 1}
    named = read_requests(
        [{"caption": "a", "source": picture(1)}], {"prompt": "caption", "image": "source"}
    )
    assert prompts_of(named) == ["a"]
    assert named[0].references[0].read().shape == (1, 3, 4, 6)
    for source, said in (
        ([], "'dataset' holds no prompt"),
        (["a", " "], r"prompts\[1\] is ' '; expected a prompt"),
        ([{"caption": "a"}], "dataset row 1: expected an object with a text field 'prompt'"),
        (["a", {"prompt": "b"}], "dataset row 1 is a str, not a dictionary"),
    ):
        with pytest.raises(ValueError, match=said):
            read_requests(source)


def test_a_dataset_of_the_hub_is_a_stream_of_one_split(monkeypatch):
    asked = []

    def load(path, revision, split, streaming, **options):
        asked.append((path, revision, split, streaming, [*options]))
        stream = table_of(PAIRS).to_iterable_dataset()
        if path == "o/none":
            raise datasets().exceptions.DatasetNotFoundError("Dataset 'o/none' doesn't exist\nmore")
        return stream if split else datasets().IterableDatasetDict(train=stream, test=stream)

    def build(path, revision):
        from datasets.packaged_modules.parquet.parquet import ParquetConfig

        config = ParquetConfig() if path == "o/n" else datasets().BuilderConfig()
        return SimpleNamespace(config=config)

    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.setattr("datasets.load_dataset_builder", build)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    found = open_dataset("hub:o/n@v1:train[:2]")
    assert [record.prompt for record in found] == ["p0", "p1", "p2"]
    assert list(open_dataset("hub:o/csv:train")) == list(found)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert list(open_dataset("hub:o/n:train")) == list(found)
    assert asked == [
        ("o/n", "v1", "train[:2]", True, ["fragment_scan_options"]),
        ("o/csv", None, "train", True, []),
        ("o/n", None, "train", False, []),
    ]
    with pytest.raises(
        ValueError, match=r"has the splits train, test; name one, such as .hub:o/n:tr"
    ):
        open_dataset("hub:o/n")
    with pytest.raises(
        ValueError, match="hub:o/none could not be opened: Dataset 'o/none' doesn't"
    ):
        open_dataset("hub:o/none")


@pytest.mark.slow
def test_local_files_do_not_import_the_library(tmp_path):
    path = to_file(tmp_path, LABELS)
    code = f"import flowalign.data as d; list(d.open_dataset({path!r}))"
    code += "; import sys; print('datasets' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
