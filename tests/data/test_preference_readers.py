"""Preference datasets: rows become records, and invalid rows are rejected."""

import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from flowalign.data.media.media import Media
from flowalign.data.readers import open_dataset

PAIR = {"prompt": "a cat", "chosen": "a.png", "rejected": "b.png"}
LOCAL = {"caption": "a cat", "positive": "a.mp4", "negative": "b.mp4", "mask": "m.safetensors"}
THUMB = {"prompt": "a cat", "image": "a.png", "label": 1}


def jsonl(folder: Path, *rows: dict) -> str:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def only(folder: Path, row: dict, schema: str):
    """The one record, and the schema is found by the columns."""
    dataset = open_dataset(jsonl(folder, row))
    assert dataset.schema.name == schema
    (record,) = dataset
    return record


def problem(folder: Path, row: dict) -> str:
    (record,) = open_dataset(jsonl(folder, row))
    assert not record.media
    return record.problem


def test_the_chosen_one_is_first_and_wins(tmp_path):
    record = only(tmp_path, PAIR | {"seed": 4}, "chosen_rejected")
    assert record.prompt == "a cat"
    assert record.media == [Media(str(tmp_path / name)) for name in ("a.png", "b.png")]
    assert record.ranks == {"overall": [1, 2]}
    assert record.ratings == {}
    assert record.metadata == {"seed": 4}


def test_media_may_be_bytes(tmp_path):
    rows = [{"prompt": "p", "chosen": {"bytes": b"one", "path": "x"}, "rejected": b"two"}]
    path = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    (record,) = open_dataset(str(path))
    assert record.media == [Media(data=b"one"), Media(data=b"two")]


def test_everything_a_pair_may_have_is_checked_and_kept(tmp_path):
    row = PAIR | {
        "dimension": "VQ",
        "gap": "0.25",
        "weight": 2,
        "stage": 3.0,
        "user_id": 7,
        "fps": 8,
        "scores_chosen": {"VQ": "10", "TA": 1, "MQ": None},
        "scores_rejected": {"VQ": 9, "MQ": 4},
        "segments": [{"start": 0, "stop": 2, "label": -1}, {"start": 2, "end": 5, "label": 1}],
        "mask": "m.safetensors",
        "weight_map_rejected": "/w.safetensors",
    }
    record = only(tmp_path, row, "chosen_rejected")
    assert record.ranks == {"VQ": [1, 2]}
    assert record.ratings == {"VQ": [10, 9]}
    assert [medium.fps for medium in record.media] == [8, 8]
    assert record.metadata == {
        "dimension": "VQ",
        "gap": 0.25,
        "weight": 2,
        "stage": 3,
        "user_id": 7,
        "fps": 8,
        "segments": [
            {"start": 0, "stop": 2, "label": -1},
            {"start": 2, "stop": 5, "label": 1},
        ],
        "mask": str(tmp_path / "m.safetensors"),
        "weight_map_rejected": "/w.safetensors",
    }


@pytest.mark.parametrize(("chosen", "ranks"), [("9", [1, 1]), (9.5, [1, 2])])
def test_equal_scores_are_a_tie_also_as_text(tmp_path, chosen, ranks):
    row = PAIR | {"chosen_score": chosen, "rejected_score": 9.0}
    assert only(tmp_path, row, "chosen_rejected").ranks == {"overall": ranks}


def test_names_and_conversations_of_other_tools_are_understood(tmp_path):
    row = {
        "prompt": [{"role": "system", "content": "draw"}, {"role": "user", "content": "a cat"}],
        "img_win": "a.png",
        "img_lose": "b.png",
        "win_score": 0.75,
        "lose_score": 0.5,
    }
    record = only(tmp_path, row, "chosen_rejected")
    assert record.prompt == "a cat"
    assert record.media[1] == Media(str(tmp_path / "b.png"))
    assert record.ratings == {"overall": [0.75, 0.5]}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"chosen_score": "high", "rejected_score": 1}, "chosen_score is 'high', not a number"),
        ({"chosen_score": 1, "rejected_score": "nan"}, "not a finite number"),
        (
            {"scores_chosen": {"VQ": "x"}, "scores_rejected": {"VQ": 1}},
            "scores_chosen of VQ is 'x'",
        ),
        ({"scores_chosen": [1]}, "scores_chosen is [1], not a struct of numbers"),
        ({"gap": "wide"}, "gap is 'wide', not a number"),
        ({"gap": "inf"}, "gap is 'inf', not a finite number"),
        ({"weight": -1}, "weight is -1; it must be at least 0"),
        ({"stage": 1.5}, "stage is 1.5, not a whole number from 0"),
        ({"stage": -1}, "stage is -1, not a whole number from 0"),
        ({"segments": "0-3"}, "segments is not a list"),
        ({"segments": [{"start": 3, "stop": 3, "label": 1}]}, "segments[0] goes from 3 to 3"),
        ({"segments": [{"start": 0, "stop": 3, "label": 2}]}, "expected -1, 0 or 1"),
        ({"segments": [{"start": 0, "label": 1}]}, "stop of segments[0] is None, not a number"),
        ({"mask": "m.pt"}, "mask is 'm.pt'; convert it to .safetensors; pickle is not supported"),
        ({"rejected": ""}, "rejected is missing"),
        ({"chosen": "https://host/a.png"}, "chosen is a URL; download it first"),
        ({"prompt": 7}, "prompt is 7, not text"),
    ],
)
def test_what_a_pair_may_not_hold_is_a_problem_of_its_row(tmp_path, columns, message):
    found = problem(tmp_path, PAIR | columns)
    assert found.startswith("invalid row: data.jsonl row 1: ")
    assert message in found


def test_local_dpo_is_a_video_its_corrupted_copy_and_where(tmp_path):
    record = only(tmp_path, LOCAL | {"yita": 0.8, "fps": 16, "sizes": [480, 832]}, "local_dpo")
    assert record.prompt == "a cat"
    paths = [str(tmp_path / name) for name in ("a.mp4", "b.mp4")]
    assert record.media == [Media(path, fps=16.0) for path in paths]
    assert record.ranks == {"overall": [1, 2]}
    assert record.metadata["mask"] == str(tmp_path / "m.safetensors")
    assert record.metadata["strength"] == 0.8
    assert record.metadata["sizes"] == [480, 832]


def test_local_dpo_as_its_authors_write_it(tmp_path):
    row = {
        "pos_video_path": "a.mp4",
        "neg_video_path": "b.mp4",
        "mask": "m.safetensors",
        "gen_caption": "a cat",
    }
    record = only(tmp_path, row, "local_dpo")
    assert record.prompt == "a cat"
    assert "strength" not in record.metadata
    assert "pickle is not supported" in problem(tmp_path, row | {"mask": "m.pt"})


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"yita": 0.6}, "strength is 0.6; it is a noise level above 0.6, at most 1"),
        ({"strength": -2}, "strength is -2; it is a noise level"),
        ({"yita": 80}, "strength is 80; it is a noise level"),
        ({"strength": "strong"}, "strength is 'strong', not a number"),
        ({"yita": "nan"}, "yita is 'nan', not a finite number"),
        ({"weight": -1}, "weight is -1; it must be at least 0"),
        ({"weight": "heavy"}, "weight is 'heavy', not a number"),
        ({"stage": 0.5}, "stage is 0.5, not a whole number from 0"),
        ({"segments": [{"start": 2, "stop": 1, "label": 1}]}, "segments[0] goes from 2 to 1"),
        ({"weight_map_chosen": "w.pt"}, "pickle is not supported"),
        ({"mask": None}, "mask is ''"),
    ],
)
def test_what_a_local_dpo_pair_may_not_hold_is_a_problem_of_its_row(tmp_path, columns, message):
    path = jsonl(tmp_path, LOCAL, LOCAL | columns)
    good, bad = open_dataset(path)
    assert good.problem == ""
    assert message in bad.problem


def test_what_a_local_dpo_pair_may_have_is_kept_as_numbers(tmp_path):
    row = LOCAL | {"yita": "0.85", "weight": "2.5", "stage": 3.0, "gap": 0.5}
    metadata = only(tmp_path, row, "local_dpo").metadata
    assert [metadata[name] for name in ("strength", "weight", "stage", "gap")] == [
        0.85,
        2.5,
        3,
        0.5,
    ]
    nearly = only(tmp_path, LOCAL | {"yita": 1}, "local_dpo")
    assert nearly.metadata["strength"] == 1


@pytest.mark.parametrize(
    ("label", "desirable"),
    [
        (1, True),
        (0, False),
        (True, True),
        (False, False),
        ("1", True),
        ("false", False),
        ("True", True),
        (0.0, False),
    ],
)
def test_a_label_is_a_thumb_up_or_down(tmp_path, label, desirable):
    record = only(tmp_path, THUMB | {"label": label, "user_id": "u"}, "kto")
    assert record.media == [Media(str(tmp_path / "a.png"))]
    assert record.metadata == {"label": label, "user_id": "u", "desirable": desirable}


@pytest.mark.parametrize("label", ["cat", 0.5, 2])
def test_a_label_of_another_meaning_leaves_a_record_to_score(tmp_path, label):
    record = only(tmp_path, THUMB | {"label": label}, "kto")
    assert record.problem == ""
    assert record.metadata == {"label": label}


def test_records_come_with_their_file_and_row(tmp_path):
    path = jsonl(tmp_path, PAIR, PAIR | {"stage": "x"}, PAIR)
    text = Path(path).read_text().replace("\n", "\n\n", 1)
    Path(path).write_text(text)
    dataset = open_dataset(path)
    assert [where for where, _ in dataset.iter_located()] == [
        f"data.jsonl row {number}" for number in (1, 3, 4)
    ]
    assert [record for _, record in dataset.iter_located()] == list(dataset)
