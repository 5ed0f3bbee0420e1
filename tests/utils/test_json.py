"""JSON of other programs and of earlier runs is read in one way, and refused by file and row."""

import json
import re
from pathlib import Path

import pytest

from flowalign.curation.score_table import read_table
from flowalign.curation.scoring.part_files import PartFiles
from flowalign.curation.votes.questions import VoteTable
from flowalign.data import open_dataset
from flowalign.data.readers.find_files import find_files
from flowalign.data.requests import read_requests
from flowalign.rewards.protocol import read_request
from flowalign.studies.benchmark.external import read_objects
from flowalign.studies.benchmark.items import ModelFolder
from flowalign.utils.files import parse_json
from flowalign.utils.folders import compare_settings
from flowalign.utils.tracking import read_metrics

BAD = {
    "deep": (b'{"prompt": %s}' % (b"[" * 100_000 + b"]" * 100_000), "nested too deep"),
    "digits": (b'{"prompt": %s}' % (b"9" * 5000), "number of 5000 digits"),
    "400 digits": (b'{"prompt": [%s]}' % (b"9" * 400), "number of 400 digits"),
    "NUL": (b'{"prompt": "a\\u0000b"}', "NUL"),
    "half": (b'{"prompt": "\\uD83D"}', "half of a character"),
    "encoding": (b'{"prompt": "caf\xe9"}', "utf-8"),
    "cut": (b'{"prompt": "ca', "Unterminated string|Invalid control"),
}
SAFE = [r'{"a": "\\u0000 \\ud83d"}', r'"\ud83d\ude00"', "1" * 308, "\ufeff[1, 2.5e300]", "NaN"]


def put(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return folder / name


def read_rows(folder: Path, name: str, content: bytes) -> None:
    good = b'{"prompt": "a", "image": "a.png"}'
    lines = [good, content] if name.endswith("l") else [b"[" + good, b",", content, b"]"]
    put(folder, name, b"\n".join(lines))
    for record in open_dataset(str(folder / name)):
        if record.problem:
            raise ValueError(record.problem)


SURFACES = {
    "rows": lambda folder, content: read_rows(folder, "data.jsonl", content),
    "list": lambda folder, content: read_rows(folder, "data.json", content),
    "prompts": lambda folder, content: read_requests(str(put(folder, "p.jsonl", content))),
    "scores": lambda folder, content: read_table(put(folder, "scores.jsonl", content), ()),
    "results": lambda folder, content: list(read_objects(put(folder, "r.jsonl", content))),
    "votes": lambda folder, content: VoteTable(put(folder, "votes.jsonl", content + b"\n")),
    "manifest": lambda folder, content: compare_settings(put(folder, "m.json", content), {}, "x"),
    "parts": lambda folder, content: list(
        PartFiles(put(folder, "parts/00000000.jsonl", b"{}\n" + content).parent).rows([0])
    ),
    "metrics": lambda folder, content: read_metrics(
        put(folder, "metrics.jsonl", content + b'\n{"step": 1}\n').parent
    ),
    "dataset": lambda folder, content: find_files(
        str(put(folder, "saved/state.json", content).parent)
    ),
    "items": lambda folder, content: ModelFolder(
        put(folder, "items/00000.json", content).parents[1], "", ".png"
    ).read(0),
}


@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize("kind", BAD)
def test_bad_json_is_refused_with_its_file(tmp_path, surface, kind):
    content, said = BAD[kind]
    with pytest.raises(ValueError, match=said) as error:
        SURFACES[surface](tmp_path, content)
    assert re.search(r"\.jsonl?\b", str(error.value))
    assert len(str(error.value)) < 700


@pytest.mark.parametrize("kind", BAD)
def test_a_request_with_bad_json_is_refused(kind):
    with pytest.raises(ValueError, match=BAD[kind][1]):
        read_request(BAD[kind][0], "application/json", lambda _: None)


@pytest.mark.parametrize("text", SAFE)
def test_other_json_has_the_value_of_the_standard_library(text):
    assert repr(parse_json(text.encode())) == repr(json.loads(text.removeprefix("\ufeff")))


SHAPES = {
    "manifest": b"[]",
    "parts": b'{"record": "a"}',
    "metrics": b"[1]",
    "dataset": b'{"_data_files": [1]}',
    "items": b"{}",
    "votes": b'{"id": "a", "question": 1}',
}


@pytest.mark.parametrize("surface", SHAPES)
def test_a_stored_file_of_another_shape_is_named(tmp_path, surface):
    with pytest.raises(ValueError, match=r"\.jsonl?\b"):
        SURFACES[surface](tmp_path, SHAPES[surface])
