"""Allowed and forbidden content of a user's YAML file."""

import json
import re
from pathlib import Path

import pytest
import yaml

from flowalign.curation.score_table import read_table
from flowalign.curation.scoring.part_files import PartFiles
from flowalign.curation.votes.questions import VoteTable
from flowalign.data import open_dataset
from flowalign.data.readers.find_files import find_files
from flowalign.data.requests import read_requests
from flowalign.rewards.protocol import read_request
from flowalign.studies.benchmark.external import read_objects
from flowalign.studies.benchmark.items import ModelFolder
from flowalign.utils.errors import ConfigError
from flowalign.utils.files import parse_json
from flowalign.utils.folders import compare_settings
from flowalign.utils.strict_yaml import parse_yaml, read_yaml
from flowalign.utils.tracking import read_metrics
from tests.fixtures.commands import refusal

BOMB = "a0: &a0 [x, x]\n" + "".join(
    f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]\n" for k in range(1, 12)
)
MERGE_BOMB = "m0: &m0 {a: 1, b: 2}\n" + "".join(
    f"m{k}: &m{k} {{<<: [*m{k - 1}, *m{k - 1}], c: 1}}\n" for k in range(1, 40)
)
CHAIN = "c0: &c0 [1]\n" + "".join(f"c{k}: &c{k} [*c{k - 1}]\n" for k in range(1, 60))

REFUSED = {
    "a key twice": ("seed: 1\nema: {}\nseed: 2\n", "key 'seed' is given twice, in lines 1 and 3"),
    "a key twice in a list": ("- {a: 1,\n   a: 2}\n", "key 'a' is given twice, in lines 1 and 2"),
    "a key in two spellings": ("'a': 1\na: 2\n", "key 'a' is given twice, in lines 1 and 2"),
    "a bool in two spellings": ("yes: 1\ntrue: 2\n", "key 'true' is given twice"),
    "two merges": ("- &x {a: 1}\n- <<: *x\n  <<: *x\n", "key '<<' is given twice"),
    "a bomb of aliases": (BOMB, "more than 20,000 values, aliases followed (line 5)"),
    "a bomb of merges": (MERGE_BOMB, "more than 20,000 values, aliases followed"),
    "many values": ("[" + "1," * 20_000 + "1]", "more than 20,000 values"),
    "many bytes": ("a: " + "x" * 1_000_001, "it is larger than 1,000,000 bytes"),
    "deep brackets": ("[" * 5000, "values are nested more than 50 deep (line 1)"),
    "deep mappings": (
        "\n".join(" " * k + "a:" for k in range(500)),
        "values are nested more than 50 deep (line 50)",
    ),
    "a chain of aliases": (CHAIN, "values are nested more than 50 deep (line 49)"),
    "an alias of itself": ("a: &a [1, *a]\n", "alias 'a' refers to itself (line 1)"),
    "a tag of Python": ("a: !!python/object/apply:os.system [ls]\n", "tag 'tag:yaml.org"),
    "a tag of YAML": ("a: !!int x\n", "tag 'tag:yaml.org,2002:int' is not allowed (line 1)"),
    "a number of no digits": ("a: 0x_\n", "invalid literal for int()"),
    "a NUL": ("a: \0\n", "unacceptable character #x0000"),
    "an unknown alias": ("a: *b\n", "found undefined alias 'b' in line 1"),
    "two documents": ("a: 1\n---\na: 2\n", "expected a single document"),
    "a list for a key": ("[1, 2]: 3\n", "found unhashable key"),
}


@pytest.mark.parametrize(("text", "told"), REFUSED.values(), ids=REFUSED)
def test_what_is_ambiguous_or_endless_is_refused_in_one_line(tmp_path, text, told):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        read_yaml(tmp_path / "a.yaml", "a.yaml")
    message = str(error.value)
    assert message.startswith("a.yaml cannot be read as YAML: ")
    assert told in message
    assert len(message.splitlines()) == 1


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"^a\.yaml cannot be read as YAML: .utf-8. codec"):
        read_yaml(tmp_path / "a.yaml", "a.yaml")


def test_a_folder_and_a_missing_file_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="is a folder, not a YAML file"):
        read_yaml(tmp_path)
    with pytest.raises(ConfigError, match=r"no.yaml does not exist \(looked in"):
        read_yaml(tmp_path / "no.yaml")


def test_anchors_of_ordinary_use_mean_what_they_say():
    text = "a: &a {x: 1, y: &y [2, 3]}\nb: {<<: *a, x: 4}\nc: {<<: *a, z: *y}\nd: [*y, *y]\n"
    assert parse_yaml(text) == yaml.safe_load(text)


def test_an_overridden_merge_that_is_merged_again_is_no_key_given_twice():
    text = "p: {q: &b {<<: &a {x: 1}, x: 2}}\nc: {<<: *b, x: 3}\n"
    assert parse_yaml(text) == {"p": {"q": {"x": 2}}, "c": {"x": 3}}


@pytest.mark.parametrize(
    ("text", "number"), [("010", 8), ("-0_17", -15), ("1:30", 90), ("0512", 330)]
)
def test_numbers_that_yaml_reads_as_others_are_refused(text, number):
    with pytest.raises(yaml.YAMLError, match=rf"{text} \(line 2\) is {number} in YAML: write"):
        parse_yaml(f"a: 1\nb: {text}\n")
    assert parse_yaml(f"a: '{text}'\nb: [0, 10, -3, 1_000, 0x1f, 0.5]\n") == {
        "a": text,
        "b": [0, 10, -3, 1000, 31, 0.5],
    }


def test_fifty_levels_are_allowed():
    text = "[" * 50 + "]" * 50
    assert parse_yaml(text) == yaml.safe_load(text)


@pytest.mark.slow
def test_every_yaml_file_of_the_package_is_read_as_before():
    """Numbers like 1e-3 are the one difference, and the package writes none."""
    files = sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml"))
    assert len(files) > 90
    for file in files:
        assert read_yaml(file) == yaml.safe_load(file.read_text()), file


@pytest.mark.parametrize(
    "words",
    [
        ["check", "FILE"],
        ["check", "configs/shapes.yaml", "FILE"],
        ["clip-pairs", "FILE"],
        ["reward", "train", "FILE"],
        ["score", "pictures.jsonl", "--rewards", "FILE", "--out", "scores"],
        ["serve-reward", "FILE"],
    ],
    ids=" ".join,
)
def test_every_verb_refuses_a_key_given_twice_with_the_file_and_the_lines(tmp_path, capsys, words):
    (tmp_path / "twice.yaml").write_text("seed: 1\nseed: 2\n")
    (tmp_path / "pictures.jsonl").write_text('{"image": "a.png", "prompt": "a"}\n')
    places = {"FILE": "twice.yaml", "pictures.jsonl": "pictures.jsonl", "scores": "scores"}
    told = refusal(capsys, *(tmp_path / places[w] if w in places else w for w in words))
    assert "twice.yaml cannot be read as YAML: key 'seed' is given twice, in lines 1 and 2" in told


# JSON of other programs and of earlier runs is read in one way, and refused by file and row -------


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
